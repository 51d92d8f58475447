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

-- How many names and views one entry of the tail holds.
local TOLD = 1000

-- apply(view, driver epoch, source, mark seen, new mark, bucket span ms, future limit ms, tail length, items…)
--   A name start count newest run    append a run to a log; start is that of its bucket
--   S name                           seal the log's bucket
--   O id topic key value             put a message into the outbox
--   C field n                        add to a counter
--   T ms                             raise the source's running-maximum time
-- Writes everything or nothing: a mark that is not the mark seen is refused with the stored one.
local function apply(keys, args)
  local tag, view, source = keys[1], args[1], args[3]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  local marks = tag .. ':marks:' .. view
  local stored = redis.call('HGET', marks, source) or '-1'
  if stored ~= args[4] then return {'moved', stored} end
  local epoch = redis.call('HGET', tag .. ':meta', 'epoch')
  if not epoch then return {'unready'} end
  local now, span = milliseconds(), tonumber(args[6])
  local latest = now + args[7]
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, appended, touched, seen = number, 0, {}, {}
  local i, n = 9, #args
  while i <= n do
    local kind = args[i]
    if kind == 'A' then
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
      number = number + 1
      redis.call('XADD', tag .. ':outbox', text(number) .. '-0', 'e', epoch, 'i', args[i + 1], 't', args[i + 2],
        'k', args[i + 3], 'v', args[i + 4])
      i = i + 5
    elseif kind == 'C' then
      redis.call('HINCRBY', tag .. ':counts:' .. view, args[i + 1], args[i + 2])
      i = i + 3
    else
      local times = tag .. ':times:' .. view
      if tonumber(redis.call('HGET', times, source) or '-1') < tonumber(args[i + 1]) then
        redis.call('HSET', times, source, args[i + 1])
      end
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

-- advance(view, driver epoch, (source, offset)…): raises the marks of sources that had nothing for this shard.
local function advance(keys, args)
  local tag, view = keys[1], args[1]
  local owner = fenced(tag, view, tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  if redis.call('EXISTS', tag .. ':meta') == 0 then return {'unready'} end
  local marks = tag .. ':marks:' .. view
  for i = 3, #args, 2 do
    local stored = redis.call('HGET', marks, args[i])
    if not stored or tonumber(stored) < tonumber(args[i + 1]) then redis.call('HSET', marks, args[i], args[i + 1]) end
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

-- What upkeep does. Every call carries the token of its lease; a lower one than a shard has seen is refused.

local UPKEEP = 'upkeep'

-- lease(what, owner, length ms, token held or 0): gives the lease to one owner at a time, each time with a higher token.
local function lease(keys, args)
  local key, now = keys[1] .. ':lease:' .. args[1], milliseconds()
  local h = redis.call('HMGET', key, 'owner', 'token', 'until')
  local token, ends = tonumber(h[2] or '0'), tonumber(h[3] or '0')
  local mine = h[1] == args[2] and h[2] == args[4]
  if args[4] ~= '0' and not mine then return {'lost', h[1] or '', text(token)} end
  if not mine then
    if ends > now then return {'held', h[1], text(ends - now)} end
    token = math.max(token + 1, math.floor(now / 1000))
  end
  redis.call('HSET', key, 'owner', args[2], 'token', text(token), 'until', text(now + args[3]))
  return {'ok', text(token)}
end

-- stage(token, view, name, index, length ms, anew, entry id, piece, newest): writes a piece to a key that nobody reads yet
-- and that ends by itself; anew = 1 begins with nothing.
local function stage(keys, args)
  local tag = keys[1]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local staged = tag .. ':staged:' .. args[1] .. ':' .. args[2] .. ':' .. args[4] .. ':' .. args[3]
  if args[6] == '1' then redis.call('UNLINK', staged) end
  redis.call('XADD', staged, args[7], 'r', args[8], 't', args[9])
  redis.call('PEXPIRE', staged, args[5])
  return {'ok'}
end

-- Puts a staged key in a segment's place. The old one is unlinked first: RENAME would free it at once, however large.
local function put_staged(tag, token, view, index, name)
  local segment = segment_key(tag, view, index, name)
  redis.call('UNLINK', segment)
  redis.call('RENAME', tag .. ':staged:' .. token .. ':' .. view .. ':' .. index .. ':' .. name, segment)
  redis.call('PERSIST', segment)
end

-- Whether what is staged for a segment is complete: so many pieces, the last of which ends at this number.
local function is_staged(tag, token, view, index, name, pieces, last)
  local staged = tag .. ':staged:' .. token .. ':' .. view .. ':' .. index .. ':' .. name
  if redis.call('XLEN', staged) ~= tonumber(pieces) then return false end
  local newest = redis.call('XREVRANGE', staged, '+', '-', 'COUNT', 1)[1]
  return newest and string.match(newest[1], '^%d+') == last
end

-- swap(token, view, name, index, epoch, last, events, pieces, bytes, raw bytes, after ms, now ms): makes a segment packed.
-- It must be what was read, its bucket over for long enough by both clocks, and its pieces complete.
local function swap(keys, args)
  local tag, token, view, name, index = keys[1], args[1], args[2], args[3], args[4]
  local owner = fenced(tag, UPKEEP, tonumber(token))
  if owner then return {'stale', text(owner)} end
  local log = log_key(tag, view, name)
  local row, open = find_row(log, index)
  if not row then return {'gone'} end
  if row[10] == PACKED or row[3] ~= tonumber(args[5]) or row[5] ~= tonumber(args[6]) or row[6] ~= tonumber(args[7]) then
    return {'moved'}
  end
  local ends = row[1] + row[2]
  if row[10] ~= SEALED and ends + args[11] > math.min(milliseconds(), tonumber(args[12])) then return {'early'} end
  if not is_staged(tag, token, view, index, name, args[8], args[6]) then return {'unstaged'} end
  put_staged(tag, token, view, index, name)
  row[7], row[9], row[10] = tonumber(args[9]), tonumber(args[10]), PACKED
  redis.call('HSET', log, 's' .. index, cmsgpack.pack(row))
  if open then redis.call('HDEL', log, unpack(OPEN)) end
  raise_floor(log, ends)
  return {'ok'}
end

-- expire(token, view, name, keep ms, now ms, remember ms, most): drops a log's oldest segments whose buckets, and whose
-- newest events, are older than what is kept, by both clocks. Answers how many, their events and their bytes, and
-- whether the log ended with them.
local function expire(keys, args)
  local tag, view, name = keys[1], args[2], args[3]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local log, now = log_key(tag, view, name), math.min(milliseconds(), tonumber(args[5]))
  local newest_index = tonumber(redis.call('HGET', log, 'i') or '-1')
  local at, segments, events, bytes = tonumber(redis.call('HGET', log, 'a') or '0'), 0, 0, 0
  local ended, left, epoch, carried = nil, false, nil, {}
  while at <= newest_index and segments < tonumber(args[7]) do
    local index = text(at)
    local row, open = find_row(log, index)
    if row then
      if math.max(row[1] + row[2], row[8]) + args[4] > now then left = true break end
      redis.call('UNLINK', segment_key(tag, view, index, name))
      redis.call('HDEL', log, 's' .. index)
      if open then redis.call('HDEL', log, unpack(OPEN)) end
      raise_floor(log, row[1] + row[2])
      ended = text(row[3]) .. ' ' .. text(row[5])
      if row[3] ~= epoch then epoch, carried = row[3], {} end
      for i = 11, #row do carried[#carried + 1] = row[i] end
      segments, events, bytes = segments + 1, events + row[6], bytes + row[7]
    end
    at = at + 1
  end
  if segments == 0 then return {'ok', '0', '0', '0', ''} end
  redis.call('HSET', log, 'a', text(at), 'x', ended)
  redis.call('HINCRBY', tag .. ':counts:' .. view, 'expired', events)
  -- What a rebuild stood for is kept by the first segment of it that is left.
  local row, open = find_row(log, text(at))
  if #carried > 0 and row and not open and row[3] == epoch then
    for i = 1, #carried do row[#row + 1] = carried[i] end
    redis.call('HSET', log, 's' .. text(at), cmsgpack.pack(row))
  end
  if left or at <= newest_index then return {'ok', text(segments), text(events), text(bytes), ''} end
  -- Nothing is left: the name goes; its floor and its end stay for a while, and the shard remembers the latest end.
  redis.call('ZREM', tag .. ':names:' .. view, name)
  redis.call('PEXPIRE', log, args[6])
  local gone = redis.call('GET', tag .. ':gone:' .. view)
  local e, n = string.match(gone or '0 0', '^(%d+) (%d+)$')
  local number = tonumber(string.match(ended, ' (%d+)$'))
  e, n = tonumber(e), tonumber(n)
  if epoch > e or (epoch == e and number > n) then redis.call('SET', tag .. ':gone:' .. view, ended) end
  return {'ok', text(segments), text(events), text(bytes), 'ended'}
end

-- reopen(token, view, unix seconds): two new epochs, one for what is rebuilt and one for what is appended from now on, so
-- that no segment which exists now is ever written again. Answers the first and the shard's marks at this moment.
local function reopen(keys, args)
  local tag = keys[1]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local known = redis.call('HGET', tag .. ':meta', 'epoch')
  if not known then return {'unready'} end
  local epoch = math.max(tonumber(known) + 1, tonumber(args[3]))
  redis.call('HSET', tag .. ':meta', 'epoch', text(epoch + 1))
  return {'ok', text(epoch), redis.call('HGETALL', tag .. ':marks:' .. args[2])}
end

-- A log that was lost and begun again finds what it had under the keys of its new segments.
local LEFTOVERS = 1000

-- Whether a segment's key holds something from before the segment's first number.
local function has_leftovers(key, first)
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  return oldest and tonumber(string.match(oldest[1], '^%d+')) < first
end

-- Removes leftovers from the open segment and from the keys of segments to come.
local function clear_leftovers(tag, view, name, log, top)
  local h = redis.call('HMGET', log, 'i', 'b', 'f')
  if h[2] then redis.call('XTRIM', segment_key(tag, view, h[1], name), 'MINID', h[3]) end
  for index = top + 1, tonumber(h[1]) + LEFTOVERS do
    local key = segment_key(tag, view, text(index), name)
    if redis.call('EXISTS', key) == 1 and not find_row(log, text(index)) then redis.call('UNLINK', key) end
  end
end

-- replace(token, view, name, remember ms, old segments, (index, epoch, last)…, (staged as, pieces, index, row)…): puts staged
-- segments in the place of old ones, which must be what was read and of an epoch that is over. Their indexes must be free
-- or those of old ones, and what is behind them must not begin before they do. An old one whose row cannot be read is given
-- without an epoch. A log of which nothing is left ends as one that expired.
local function replace(keys, args)
  local tag, token, view, name = keys[1], args[1], args[2], args[3]
  local owner = fenced(tag, UPKEEP, tonumber(token))
  if owner then return {'stale', text(owner)} end
  local log = log_key(tag, view, name)
  local epoch = tonumber(redis.call('HGET', tag .. ':meta', 'epoch') or '0')
  local first_new = 6 + 3 * tonumber(args[5])
  local going, open_start, ended = {}, nil, nil
  for i = 6, first_new - 1, 3 do
    if args[i + 1] == '' then
      going[args[i]] = 0
    else
      local row, open = find_row(log, args[i])
      if not row or row[3] ~= tonumber(args[i + 1]) or row[5] ~= tonumber(args[i + 2]) then return {'moved'} end
      if row[3] >= epoch then return {'moved'} end
      if open then open_start = row[1] end
      going[args[i]], ended = row[4], text(row[3]) .. ' ' .. text(row[5])
    end
  end
  local top, start
  for i = first_new, #args, 4 do
    local row = cmsgpack.unpack(args[i + 3])
    if not is_staged(tag, token, view, args[i], name, args[i + 1], text(row[5])) then return {'unstaged'} end
    if not going[args[i + 2]] and find_row(log, args[i + 2]) then return {'moved'} end
    top, start = tonumber(args[i + 2]), row[1]
  end
  if top and not going[text(top + 1)] then
    local behind = find_row(log, text(top + 1))
    if behind and behind[1] < start then return {'moved'} end
  end
  local left = redis.call('HMGET', log, 'i', 'b', 'f')
  local leftovers = not left[1] or (left[2] and has_leftovers(segment_key(tag, view, left[1], name), tonumber(left[3])))
  for i = 6, first_new - 1, 3 do
    local key = segment_key(tag, view, args[i], name)
    leftovers = leftovers or has_leftovers(key, going[args[i]])
    redis.call('UNLINK', key)
    redis.call('HDEL', log, 's' .. args[i])
  end
  if open_start then
    redis.call('HDEL', log, unpack(OPEN))
    raise_floor(log, open_start)
  end
  if not top then
    local goes_on = redis.call('HEXISTS', log, 'b') == 1
    for _, field in ipairs(redis.call('HKEYS', log)) do goes_on = goes_on or string.sub(field, 1, 1) == 's' end
    if goes_on then
      redis.call('ZADD', tag .. ':names:' .. view, 0, name)
    elseif ended then
      redis.call('HSET', log, 'x', ended)
      redis.call('ZREM', tag .. ':names:' .. view, name)
      redis.call('PEXPIRE', log, args[4])
    end
    return {'ok'}
  end
  raise_floor(log, start)
  -- The index of the newest is never below 0, so that the next segment is not taken for the first of a new log.
  local lowest, highest = tonumber(redis.call('HGET', log, 'a') or '0'), tonumber(redis.call('HGET', log, 'i') or '0')
  local newest = tonumber(redis.call('HGET', log, 't') or '0')
  for i = first_new, #args, 4 do
    local index, row, segment = tonumber(args[i + 2]), cmsgpack.unpack(args[i + 3]), segment_key(tag, view, args[i + 2], name)
    redis.call('UNLINK', segment)
    redis.call('RENAME', tag .. ':staged:' .. token .. ':' .. view .. ':' .. args[i] .. ':' .. name, segment)
    redis.call('PERSIST', segment)
    redis.call('HSET', log, 's' .. args[i + 2], args[i + 3])
    lowest, highest, newest = math.min(lowest, index), math.max(highest, index), math.max(newest, row[8])
  end
  if lowest <= 0 and tonumber(redis.call('HGET', log, 'a') or '0') > 0 then redis.call('HSET', log, 'd', '1') end
  redis.call('HSET', log, 'a', text(lowest), 'i', text(highest), 't', text(newest))
  redis.call('ZADD', tag .. ':names:' .. view, 0, name)
  redis.call('PERSIST', log)
  if leftovers then clear_leftovers(tag, view, name, log, top) end
  return {'ok'}
end

redis.register_function('tailrace_begin_VERSION', begin)
redis.register_function('tailrace_fence_VERSION', fence)
redis.register_function('tailrace_apply_VERSION', apply)
redis.register_function('tailrace_advance_VERSION', advance)
redis.register_function('tailrace_adopt_VERSION', adopt)
redis.register_function('tailrace_enlist_VERSION', enlist)
redis.register_function('tailrace_lease_VERSION', lease)
redis.register_function('tailrace_stage_VERSION', stage)
redis.register_function('tailrace_swap_VERSION', swap)
redis.register_function('tailrace_expire_VERSION', expire)
redis.register_function('tailrace_reopen_VERSION', reopen)
redis.register_function('tailrace_replace_VERSION', replace)
