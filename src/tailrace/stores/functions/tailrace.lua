-- The functions that change a shard. They compare and write opaque bytes; rules live in Python.
-- Every call declares one key, the shard's tag; all keys it touches carry that tag (see keys.py).

local function text(number) return string.format('%.0f', number) end

-- A driver owns a view until one with a higher epoch comes. Returns the owner's epoch if the caller is too old.
local function fenced(tag, view, epoch)
  local owner = tonumber(redis.call('HGET', tag .. ':fence', view) or '0')
  if owner > epoch then return owner end
  if owner < epoch then redis.call('HSET', tag .. ':fence', view, text(epoch)) end
end

-- begin(run_id, unix seconds, shards, format): a new server process means a new epoch, never one used before.
local function begin(keys, args)
  local meta = keys[1] .. ':meta'
  local known = redis.call('HMGET', meta, 'run_id', 'epoch', 'shards', 'format')
  if known[3] and (known[3] ~= args[3] or known[4] ~= args[4]) then return {'mismatch', known[3], known[4]} end
  if known[1] == args[1] then return {'ok', known[2]} end
  local epoch = text(math.max(tonumber(known[2] or '0') + 1, tonumber(args[2])))
  redis.call('HSET', meta, 'run_id', args[1], 'epoch', epoch, 'shards', args[3], 'format', args[4])
  return {'ok', epoch}
end

-- fence(view, driver epoch)
local function fence(keys, args)
  local owner = fenced(keys[1], args[1], tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  return {'ok'}
end

-- A log's hash: i index of the newest segment, a of the oldest, t running-maximum time, o floor (no bucket begins before
-- it), x epoch and number of the end of what expired, d whether something had expired before a rebuild moved a back, and
-- the fields below while a segment is open. Closed segments are rows s<index>: {start, span, epoch, first, last, events,
-- bytes, newest, raw bytes, state, replaced…}.
local OPEN = {'b', 'w', 'e', 'f', 'l', 'c', 'z'}
local RAW, PACKED, SEALED = 0, 1, 2

local function log_key(tag, view, name) return tag .. ':log:' .. view .. ':' .. name end
local function segment_key(tag, view, index, name) return tag .. ':seg:' .. view .. ':' .. index .. ':' .. name end

-- Returns the row of an open segment from the answer to HMGET t, OPEN….
local function open_row(h, state)
  return {tonumber(h[2]), tonumber(h[3]), tonumber(h[4]), tonumber(h[5]), tonumber(h[6]), tonumber(h[7]), tonumber(h[8]),
    tonumber(h[1]), 0, state}
end

-- Returns a segment's row, and whether it is the open one; nil when there is none.
local function find_row(log, index)
  local row = redis.call('HGET', log, 's' .. index)
  if row then return cmsgpack.unpack(row), false end
  local h = redis.call('HMGET', log, 't', unpack(OPEN))
  if h[2] and redis.call('HGET', log, 'i') == index then return open_row(h, RAW), true end
end

local function raise_floor(log, floor)
  local known = redis.call('HGET', log, 'o')
  if not known or tonumber(known) < floor then redis.call('HSET', log, 'o', text(floor)) end
end

-- Appends one run to a log. A run that begins before the end of the open bucket goes there; otherwise a new segment is
-- opened in its own bucket, but not before the floor nor after the latest time allowed. A new epoch opens one in the same bucket;
-- so does, if most is given, the first run of a period when the open one has so many entries: it is sealed, to be packed soon.
local function append(tag, view, epoch, span, latest, number, name, start, count, newest, run, most, period)
  local log = log_key(tag, view, name)
  local h = redis.call('HMGET', log, 't', 'b', 'w', 'e', 'f', 'l', 'c', 'z', 'i', 'o')
  local index, last, newest_seen = tonumber(h[9] or '-1'), number + count, tonumber(h[1] or '0')
  -- A record from the future must not make the log look young for ever.
  newest = math.max(math.min(newest, latest), newest_seen)
  start = math.min(start, math.floor(latest / span) * span)
  local ends = h[2] and h[2] + h[3]
  local is_full = most and h[2] and math.floor(newest / period) > math.floor(newest_seen / period)
    and redis.call('XLEN', segment_key(tag, view, h[9], name)) >= most
  if h[2] and start < ends and h[4] == epoch and not is_full then
    redis.call('HSET', log, 'l', text(last), 'c', text(h[7] + count), 'z', text(h[8] + #run), 't', text(newest))
  else
    if h[2] then
      redis.call('HSET', log, 's' .. h[9], cmsgpack.pack(open_row(h, is_full and SEALED or RAW)))
      if start < ends then start, span = tonumber(h[2]), tonumber(h[3]) end
    else
      redis.call('ZADD', tag .. ':names:' .. view, 0, name)
      redis.call('PERSIST', log)
      if h[10] and start < tonumber(h[10]) then start = math.ceil(h[10] / span) * span end
      if index < 0 then
        local gone = redis.call('GET', tag .. ':gone:' .. view)
        if gone then redis.call('HSET', log, 'x', gone) end
      end
    end
    index = index + 1
    redis.call('HSET', log, 'i', text(index), 'b', text(start), 'w', text(span), 'e', epoch, 'f', text(number + 1),
      'l', text(last), 'c', text(count), 'z', text(#run), 't', text(newest))
  end
  redis.call('XADD', segment_key(tag, view, text(index), name), text(last) .. '-' .. text(count), 'r', run, 't', text(newest))
  return last
end

-- Closes the open segment before its bucket ends, unless the bucket lies in the future: that one was opened by an
-- earlier seal, and sealing it too would run ahead of the calendar.
local function seal(tag, view, name, now)
  local log = log_key(tag, view, name)
  local h = redis.call('HMGET', log, 't', unpack(OPEN))
  if not h[2] or tonumber(h[2]) > now then return end
  redis.call('HSET', log, 's' .. redis.call('HGET', log, 'i'), cmsgpack.pack(open_row(h, SEALED)))
  redis.call('HDEL', log, unpack(OPEN))
  raise_floor(log, h[2] + h[3])
end

local function milliseconds()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Puts a message into the outbox; returns its number.
local function send(tag, epoch, number, id, topic, key, value, headers)
  number = number + 1
  local entry = {'e', epoch, 'i', id, 't', topic, 'k', key, 'v', value}
  if headers ~= '' then entry[11], entry[12] = 'h', headers end
  redis.call('XADD', tag .. ':outbox', text(number) .. '-0', unpack(entry))
  return number
end

-- A rule of folds is given as name:form, the end of its keys; what is counted is counted under its name.
local function name_of(rule) return string.match(rule, '^[^:]*') end

-- A group of a fold rule: a field of the hash fold:<rule>, whose value begins with a version of eight bytes that is never
-- used again, and a member of the sorted set due:<rule>. closed:<rule> remembers for a while when groups fell quiet.
-- Lua hands over a limited number of arguments at once.
local MOST = 1000

-- Calls a command with a key and many further arguments; pairs stay together.
local function call_many(command, key, list)
  for first = 1, #list, MOST do redis.call(command, key, unpack(list, first, math.min(first + MOST - 1, #list))) end
end

-- Returns for each group whether it has the version that was seen, '' for none.
local function have_versions(tag, rule, groups, seen)
  local same = {}
  for first = 1, #groups, MOST do
    local last = math.min(first + MOST - 1, #groups)
    local stored = redis.call('HMGET', tag .. ':fold:' .. rule, unpack(groups, first, last))
    for i = first, last do
      local value = stored[i - first + 1]
      same[i] = (value and string.sub(value, 1, 8) or '') == seen[i]
    end
  end
  return same
end

-- Writes groups; those without a value are removed.
local function write_groups(tag, rule, groups, values, dues)
  local set, due, gone = {}, {}, {}
  for i = 1, #groups do
    if values[i] == '' then
      gone[#gone + 1] = groups[i]
    else
      set[#set + 1], set[#set + 2] = groups[i], values[i]
      due[#due + 1], due[#due + 2] = dues[i], groups[i]
    end
  end
  call_many('HSET', tag .. ':fold:' .. rule, set)
  call_many('ZADD', tag .. ':due:' .. rule, due)
  call_many('HDEL', tag .. ':fold:' .. rule, gone)
  call_many('ZREM', tag .. ':due:' .. rule, gone)
end

-- What was counted and remembered of folds that a call gave out; written at its end.
local function new_account() return {counts = {}, quiet = {}, keep = {}} end

local function count(account, field, n) account.counts[field] = (account.counts[field] or 0) + n end

local function emit(tag, account, epoch, number, rule, group, id, topic, key, value, reason, last, keep)
  count(account, 'emitted:' .. name_of(rule), 1)
  count(account, 'reason:' .. name_of(rule) .. ':' .. reason, 1)
  if reason == 'quiet' then
    local quiet = account.quiet[rule] or {}
    quiet[#quiet + 1], quiet[#quiet + 2] = last, group
    account.quiet[rule], account.keep[rule] = quiet, keep
  end
  return send(tag, epoch, number, id, topic, key, value, '')
end

local function close_account(tag, account)
  for field, n in pairs(account.counts) do redis.call('HINCRBY', tag .. ':counts:folds', field, text(n)) end
  for rule, quiet in pairs(account.quiet) do
    call_many('ZADD', tag .. ':closed:' .. rule, quiet)
    redis.call('PEXPIRE', tag .. ':closed:' .. rule, account.keep[rule])
  end
end

-- Reads a G item at i: rule, inputs, groups, then for each group, seen, value, due, near. Returns it, and where the next is.
local function read_groups(args, i)
  local found = {rule = args[i + 1], inputs = tonumber(args[i + 2]), groups = {}, seen = {}, values = {}, dues = {}, near = {}}
  local n, at = tonumber(args[i + 3]), i + 4
  for k = 1, n do
    found.groups[k], found.seen[k], found.values[k], found.dues[k], found.near[k] = unpack(args, at, at + 4)
    at = at + 5
  end
  return found, at
end

-- Counts what a G item adds: groups that held nothing, and those of them that had been given out too early.
local function count_groups(tag, account, item)
  local name = name_of(item.rule)
  count(account, 'input:' .. name, item.inputs)
  local closed = tag .. ':closed:' .. item.rule
  local known = redis.call('EXISTS', closed) == 1
  for k = 1, #item.groups do
    if item.seen[k] == '' then
      count(account, 'new:' .. name, 1)
      local quieted = known and redis.call('ZSCORE', closed, item.groups[k])
      if quieted and tonumber(quieted) > tonumber(item.near[k]) then count(account, 'premature:' .. name, 1) end
    end
  end
end

-- Reads an N item at i: time seen, new time, tags, then for each tag, n, and source, seen, value for each of n. Returns it,
-- and where the next is.
local function read_numbers(args, i)
  local found, at = {seen = args[i + 1], time = args[i + 2], tags = {}}, i + 4
  for k = 1, tonumber(args[i + 3]) do
    local each = {tag = args[at], sources = {}, was = {}, pairs = {}}
    local n = tonumber(args[at + 1])
    at = at + 2
    for j = 1, n do
      each.sources[j], each.was[j] = args[at], args[at + 1]
      each.pairs[2 * j - 1], each.pairs[2 * j] = args[at], args[at + 2]
      at = at + 3
    end
    found.tags[k] = each
  end
  return found, at
end

-- Returns whether the source's time and all numbers are those seen, '' for none.
local function have_numbers(tag, view, source, item)
  local time = redis.call('HGET', tag .. ':times:' .. view, source)
  if (time and string.match(time, '^-?%d+') or '') ~= item.seen then return false end
  for _, each in ipairs(item.tags) do
    for first = 1, #each.sources, MOST do
      local last = math.min(first + MOST - 1, #each.sources)
      local stored = redis.call('HMGET', tag .. ':numbers:' .. each.tag, unpack(each.sources, first, last))
      for j = first, last do
        if (stored[j - first + 1] or '') ~= each.was[j] then return false end
      end
    end
  end
  return true
end

local function write_numbers(tag, view, source, mark, item)
  redis.call('HSET', tag .. ':times:' .. view, source, item.time .. ' ' .. mark)
  for _, each in ipairs(item.tags) do call_many('HSET', tag .. ':numbers:' .. each.tag, each.pairs) end
end

-- How many names and views one entry of the tail holds.
local TOLD = 1000
-- How many conflicts are remembered.
local CONFLICTS = 1000

-- apply(view, driver epoch, source, mark seen, new mark, bucket span ms, future limit ms, tail length, items…)
--   A name start count newest run    append a run to a log; start is that of its bucket
--   R entries ms                     from here on, begin another segment with the first run of a period of so many ms, if the open
--                                    one has so many entries
--   S name                           seal the log's bucket
--   O id topic key value headers     put a message into the outbox
--   C field n                        add to a counter
--   T ms                             raise the source's running-maximum time
--   G rule inputs n (group seen value due near)…       write what groups hold if their versions are those seen ('' for none);
--                                    no value removes one; a group that fell quiet after near was given out too early
--   N seen time tags (tag n (source seen value)…)…     write the source's time and the numbers of sources in tags, if both are those seen
--   W name                           tell the followers of a log that lies elsewhere
--   K text                           remember a conflict
--   F rule group id topic key value reason last keep   give out a closed fold; that it fell quiet is remembered for keep ms
-- Writes everything or nothing: a mark that is not the mark seen is refused with the stored one, and a group whose version is
-- not the one seen, or a number that is not, with the word conflict.
local function apply(keys, args)
  local tag, view, source = keys[1], args[1], args[3]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  local marks = tag .. ':marks:' .. view
  local stored = redis.call('HGET', marks, source) or '-1'
  if stored ~= args[4] then return {'moved', stored} end
  local epoch = redis.call('HGET', tag .. ':meta', 'epoch')
  if not epoch then return {'unready'} end
  local i, n = 9, #args
  local held = {}
  while i <= n and args[i] == 'G' do
    local item
    item, i = read_groups(args, i)
    for _, same in ipairs(have_versions(tag, item.rule, item.groups, item.seen)) do
      if not same then return {'conflict'} end
    end
    held[#held + 1] = item
  end
  local numbers
  if i <= n and args[i] == 'N' then
    numbers, i = read_numbers(args, i)
    if not have_numbers(tag, view, source, numbers) then return {'conflict'} end
    write_numbers(tag, view, source, args[5], numbers)
  end
  local now, span = milliseconds(), tonumber(args[6])
  local latest = now + args[7]
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, appended, touched, seen = number, 0, {}, {}
  local function touch(name)
    if seen[name] then return end
    seen[name] = true
    touched[#touched + 1] = name
    touched[#touched + 1] = view
  end
  local account = new_account()
  local most, period
  for _, item in ipairs(held) do
    count_groups(tag, account, item)
    write_groups(tag, item.rule, item.groups, item.values, item.dues)
  end
  while i <= n do
    local kind = args[i]
    if kind == 'F' then
      number = emit(tag, account, epoch, number, unpack(args, i + 1, i + 9))
      i = i + 10
    elseif kind == 'A' then
      local count = tonumber(args[i + 3])
      number = append(tag, view, epoch, span, latest, number, args[i + 1], tonumber(args[i + 2]), count,
        tonumber(args[i + 4]), args[i + 5], most, period)
      appended = appended + count
      touch(args[i + 1])
      i = i + 6
    elseif kind == 'R' then
      most, period = tonumber(args[i + 1]), tonumber(args[i + 2])
      i = i + 3
    elseif kind == 'W' then
      touch(args[i + 1])
      i = i + 2
    elseif kind == 'K' then
      redis.call('XADD', tag .. ':conflicts', 'MAXLEN', '~', CONFLICTS, '*', 'c', args[i + 1])
      i = i + 2
    elseif kind == 'S' then
      seal(tag, view, args[i + 1], now)
      i = i + 2
    elseif kind == 'O' then
      number = send(tag, epoch, number, unpack(args, i + 1, i + 5))
      i = i + 6
    elseif kind == 'C' then
      redis.call('HINCRBY', tag .. ':counts:' .. view, args[i + 1], args[i + 2])
      i = i + 3
    else
      -- With the mark it holds at, so that the two are never read apart.
      local times = tag .. ':times:' .. view
      local known = redis.call('HGET', times, source)
      local newest = math.max(tonumber(args[i + 1]), known and tonumber(string.match(known, '^-?%d+')) or -1)
      redis.call('HSET', times, source, text(newest) .. ' ' .. args[5])
      i = i + 2
    end
  end
  close_account(tag, account)
  if number > began then redis.call('SET', tag .. ':number', text(number)) end
  if appended > 0 then redis.call('HINCRBY', tag .. ':counts:' .. view, 'stored', appended) end
  -- Lua hands over a limited number of arguments at once.
  for first = 1, #touched, TOLD do
    redis.call('XADD', tag .. ':tail', 'MAXLEN', '~', args[8], '*', unpack(touched, first, math.min(first + TOLD - 1, #touched)))
  end
  redis.call('HSET', marks, source, args[5])
  return {'ok', args[5]}
end

-- settle(rule, driver epoch, forget ms, (group, seen, value, due, folds, (id, topic, key, value, reason, last, keep)…)…)
-- Gives out what is due of groups, each one if its version is still the one seen; answers 1 for those and 0 for others. Groups
-- that fell quiet before forget are not remembered any more. A driver that was overtaken changes nothing; others than drivers
-- have the epoch 0.
local function settle(keys, args)
  local tag, rule = keys[1], args[1]
  local epoch = redis.call('HGET', tag .. ':meta', 'epoch')
  if not epoch then return {} end
  local driver = tonumber(args[2])
  if driver > 0 and fenced(tag, 'folds', driver) then return {'stale'} end
  redis.call('ZREMRANGEBYSCORE', tag .. ':closed:' .. rule, '-inf', args[3])
  local groups, seen, places = {}, {}, {}
  local i = 4
  while i <= #args do
    groups[#groups + 1], seen[#seen + 1], places[#places + 1] = args[i], args[i + 1], i
    i = i + 5 + 7 * tonumber(args[i + 4])
  end
  local same = have_versions(tag, rule, groups, seen)
  local changed, values, dues, done = {}, {}, {}, {}
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, account = number, new_account()
  for k, at in ipairs(places) do
    done[k] = same[k] and 1 or 0
    if same[k] then
      changed[#changed + 1], values[#values + 1], dues[#dues + 1] = groups[k], args[at + 2], args[at + 3]
      for f = at + 5, at + 5 + 7 * (tonumber(args[at + 4]) - 1), 7 do
        number = emit(tag, account, epoch, number, rule, groups[k], unpack(args, f, f + 6))
      end
    end
  end
  write_groups(tag, rule, changed, values, dues)
  close_account(tag, account)
  if number > began then redis.call('SET', tag .. ':number', text(number)) end
  return done
end

-- advance(view, driver epoch, (source, offset, ms)…): raises the marks of sources that had nothing for this shard, and with
-- each its running-maximum time, where that is known.
local function advance(keys, args)
  local tag, view = keys[1], args[1]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  if redis.call('EXISTS', tag .. ':meta') == 0 then return {'unready'} end
  local marks = tag .. ':marks:' .. view
  for i = 3, #args, 3 do
    local stored = redis.call('HGET', marks, args[i])
    if not stored or tonumber(stored) < tonumber(args[i + 1]) then
      redis.call('HSET', marks, args[i], args[i + 1])
      if args[i + 2] ~= '' then redis.call('HSET', tag .. ':times:' .. view, args[i], args[i + 2] .. ' ' .. args[i + 1]) end
    end
  end
  return {'ok'}
end

-- lift(view, driver epoch, (source, ms)…): raises the times of sources of which everything up to then is applied: what comes later
-- gets no earlier stamp.
local function lift(keys, args)
  local tag, view = keys[1], args[1]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  local times = tag .. ':times:' .. view
  for i = 3, #args, 2 do
    local known = redis.call('HGET', times, args[i])
    local ms, mark = string.match(known or '', '^(-?%d+) (-?%d+)$')
    if not ms or tonumber(ms) < tonumber(args[i + 1]) then
      redis.call('HSET', times, args[i], args[i + 1] .. ' ' .. (mark or '-1'))
    end
  end
  return {'ok'}
end

-- introduce(view, driver epoch, source…): gives sources that have no time the lowest there is, before anything of them is written
-- elsewhere; returns the times of all.
local function introduce(keys, args)
  local tag, view = keys[1], args[1]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  local times, found, lowest = tag .. ':times:' .. view, {'ok'}, nil
  for i = 3, #args do
    local known = redis.call('HGET', times, args[i])
    if not known then
      if not lowest then
        for _, value in ipairs(redis.call('HVALS', times)) do
          local ms = tonumber(string.match(value, '^-?%d+'))
          if not lowest or ms < lowest then lowest = ms end
        end
      end
      known = text(lowest or 0) .. ' -1'
      redis.call('HSET', times, args[i], known)
    end
    found[#found + 1] = string.match(known, '^-?%d+')
  end
  return found
end

-- adopt(topic, topic id): the generation of a topic; another id than the stored one is the next generation.
local function adopt(keys, args)
  local topics = keys[1] .. ':topics'
  local known = redis.call('HGET', topics, args[1])
  local generation = 0
  if known then
    local g, id = string.match(known, '^(%d+) (.*)$')
    if id == args[2] then return g end
    generation = tonumber(g) + 1
  end
  redis.call('HSET', topics, args[1], text(generation) .. ' ' .. args[2])
  return text(generation)
end

-- enlist(unix seconds): a driver epoch that was never given out.
local function enlist(keys, args)
  local drivers = keys[1] .. ':drivers'
  local epoch = text(math.max(tonumber(redis.call('GET', drivers) or '0') + 1, tonumber(args[1])))
  redis.call('SET', drivers, epoch)
  return epoch
end

-- What upkeep needs to make room must also work in a store that is full.
local function register_for_full(name, callback)
  redis.register_function{function_name = name, callback = callback, flags = {'allow-oom'}}
end

register_for_full('tailrace_begin_VERSION', begin)
register_for_full('tailrace_fence_VERSION', fence)
redis.register_function('tailrace_apply_VERSION', apply)
redis.register_function('tailrace_settle_VERSION', settle)
redis.register_function('tailrace_advance_VERSION', advance)
redis.register_function('tailrace_lift_VERSION', lift)
redis.register_function('tailrace_introduce_VERSION', introduce)
redis.register_function('tailrace_adopt_VERSION', adopt)
redis.register_function('tailrace_enlist_VERSION', enlist)
