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
-- opened in its own bucket, but not before the floor nor after the latest time allowed. A new epoch opens one in the same bucket.
local function append(tag, view, epoch, span, latest, number, name, start, count, newest, run)
  local log = log_key(tag, view, name)
  local h = redis.call('HMGET', log, 't', 'b', 'w', 'e', 'f', 'l', 'c', 'z', 'i', 'o')
  local index, last, newest_seen = tonumber(h[9] or '-1'), number + count, tonumber(h[1] or '0')
  -- A record from the future must not make the log look young for ever.
  newest = math.max(math.min(newest, latest), newest_seen)
  start = math.min(start, math.floor(latest / span) * span)
  local ends = h[2] and h[2] + h[3]
  if h[2] and start < ends and h[4] == epoch then
    redis.call('HSET', log, 'l', text(last), 'c', text(h[7] + count), 'z', text(h[8] + #run), 't', text(newest))
  else
    if h[2] then
      redis.call('HSET', log, 's' .. h[9], cmsgpack.pack(open_row(h, RAW)))
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

-- A group of a fold rule: a field of the hash fold:<rule>, whose value begins with a version of eight bytes that is never
-- used again, and a member of the sorted set due:<rule>. closed:<rule> remembers for a while when groups fell quiet.
local function has_version(tag, rule, group, seen)
  local stored = redis.call('HGET', tag .. ':fold:' .. rule, group)
  return (stored and string.sub(stored, 1, 8) or '') == seen
end

local function write_group(tag, rule, group, version, state, due)
  if state == '' then
    redis.call('HDEL', tag .. ':fold:' .. rule, group)
    redis.call('ZREM', tag .. ':due:' .. rule, group)
  else
    redis.call('HSET', tag .. ':fold:' .. rule, group, version .. state)
    redis.call('ZADD', tag .. ':due:' .. rule, due, group)
  end
end

local function emit(tag, epoch, number, rule, group, id, topic, key, value, reason, last, keep)
  local counts = tag .. ':counts:folds'
  redis.call('HINCRBY', counts, 'emitted:' .. rule, 1)
  redis.call('HINCRBY', counts, 'reason:' .. rule .. ':' .. reason, 1)
  if reason == 'quiet' then
    redis.call('ZADD', tag .. ':closed:' .. rule, last, group)
    redis.call('PEXPIRE', tag .. ':closed:' .. rule, keep)
  end
  return send(tag, epoch, number, id, topic, key, value, '')
end

-- How many names and views one entry of the tail holds.
local TOLD = 1000

-- apply(view, driver epoch, source, mark seen, new mark, bucket span ms, future limit ms, tail length, items…)
--   A name start count newest run    append a run to a log; start is that of its bucket
--   S name                           seal the log's bucket
--   O id topic key value headers     put a message into the outbox
--   C field n                        add to a counter
--   T ms                             raise the source's running-maximum time
--   G rule group seen version state due inputs near    write a group's folds if its version is the one seen ('' for none);
--                                    no state removes it; a group that fell quiet after near was given out too early
--   F rule group id topic key value reason last keep   give out a closed fold; that it fell quiet is remembered for keep ms
-- Writes everything or nothing: a mark that is not the mark seen is refused with the stored one, and a group whose version is
-- not the one seen with the word conflict.
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
  while i <= n and args[i] == 'G' do
    if not has_version(tag, args[i + 1], args[i + 2], args[i + 3]) then return {'conflict'} end
    i = i + 9
  end
  local now, span = milliseconds(), tonumber(args[6])
  local latest = now + args[7]
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, appended, touched, seen = number, 0, {}, {}
  i = 9
  while i <= n do
    local kind = args[i]
    if kind == 'G' then
      local rule, group, inputs = args[i + 1], args[i + 2], tonumber(args[i + 7])
      local counts = tag .. ':counts:folds'
      if inputs > 0 then redis.call('HINCRBY', counts, 'input:' .. rule, inputs) end
      if args[i + 3] == '' then
        redis.call('HINCRBY', counts, 'new:' .. rule, 1)
        local quieted = redis.call('ZSCORE', tag .. ':closed:' .. rule, group)
        if quieted and tonumber(quieted) > tonumber(args[i + 8]) then
          redis.call('HINCRBY', counts, 'premature:' .. rule, 1)
        end
      end
      write_group(tag, rule, group, args[i + 4], args[i + 5], args[i + 6])
      i = i + 9
    elseif kind == 'F' then
      number = emit(tag, epoch, number, unpack(args, i + 1, i + 9))
      i = i + 10
    elseif kind == 'A' then
      local count = tonumber(args[i + 3])
      number = append(tag, view, epoch, span, latest, number, args[i + 1], tonumber(args[i + 2]), count,
        tonumber(args[i + 4]), args[i + 5])
      appended = appended + count
      if not seen[args[i + 1]] then
        seen[args[i + 1]] = true
        touched[#touched + 1] = args[i + 1]
        touched[#touched + 1] = view
      end
      i = i + 6
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
  if number > began then redis.call('SET', tag .. ':number', text(number)) end
  if appended > 0 then
    redis.call('HINCRBY', tag .. ':counts:' .. view, 'stored', appended)
    -- Lua hands over a limited number of arguments at once.
    for first = 1, #touched, TOLD do
      redis.call('XADD', tag .. ':tail', 'MAXLEN', '~', args[8], '*',
        unpack(touched, first, math.min(first + TOLD - 1, #touched)))
    end
  end
  redis.call('HSET', marks, source, args[5])
  return {'ok', args[5]}
end

-- settle(rule, forget ms, (group, seen, version, state, due, folds, (id, topic, key, value, reason, last, keep)…)…)
-- Gives out what is due of groups, each one if its version is still the one seen; answers 1 for those and 0 for others. Groups
-- that fell quiet before forget are not remembered any more.
local function settle(keys, args)
  local tag, rule = keys[1], args[1]
  local epoch = redis.call('HGET', tag .. ':meta', 'epoch')
  if not epoch then return {} end
  redis.call('ZREMRANGEBYSCORE', tag .. ':closed:' .. rule, '-inf', args[2])
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, done = number, {}
  local i = 3
  while i <= #args do
    local group, folds = args[i], tonumber(args[i + 5])
    local same = has_version(tag, rule, group, args[i + 1])
    if same then
      write_group(tag, rule, group, args[i + 2], args[i + 3], args[i + 4])
      for f = 0, folds - 1 do
        number = emit(tag, epoch, number, rule, group, unpack(args, i + 6 + 7 * f, i + 12 + 7 * f))
      end
    end
    done[#done + 1] = same and 1 or 0
    i = i + 6 + 7 * folds
  end
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

redis.register_function('tailrace_begin_VERSION', begin)
redis.register_function('tailrace_fence_VERSION', fence)
redis.register_function('tailrace_apply_VERSION', apply)
redis.register_function('tailrace_settle_VERSION', settle)
redis.register_function('tailrace_advance_VERSION', advance)
redis.register_function('tailrace_adopt_VERSION', adopt)
redis.register_function('tailrace_enlist_VERSION', enlist)
