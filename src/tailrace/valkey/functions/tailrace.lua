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

-- A log's hash: i index of the newest segment, a of the oldest, t running-maximum time when the newest segment was opened or
-- closed, o floor (no bucket begins before it), x epoch and number of the end of what expired, d whether something had
-- expired before a rebuild moved a back, and the fields below while a segment is open. Closed segments are rows s<index>:
-- {start, span, epoch, first, last, events, bytes, newest, raw bytes, state, replaced…}. Of an open one b, w, e and f are the
-- first four; p has last, events, bytes and newest, with blanks between. Before p there were l, c and z, and a t that rose.
local OPEN = {'b', 'w', 'e', 'f', 'p', 'l', 'c', 'z'}
local RAW, PACKED, SEALED = 0, 1, 2

local function log_key(tag, view, name) return tag .. ':log:' .. view .. ':' .. name end
local function segment_key(tag, view, index, name) return tag .. ':seg:' .. view .. ':' .. index .. ':' .. name end

-- Returns the row of an open segment from the answer to HMGET t, OPEN….
local function open_row(h, state)
  local last, events, bytes, newest = h[7], h[8], h[9], h[1]
  if h[6] then last, events, bytes, newest = string.match(h[6], '^(%d+) (%d+) (%d+) (%d+)$') end
  return {tonumber(h[2]), tonumber(h[3]), tonumber(h[4]), tonumber(h[5]), tonumber(last), tonumber(events), tonumber(bytes),
    tonumber(newest), 0, state}
end

-- Ends the open segment of a log, whose row is stored by the caller, or removed.
local function end_open(log, row)
  redis.call('HDEL', log, unpack(OPEN))
  redis.call('HSET', log, 't', text(row[8]))
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

-- Opens a segment for a run, in its own bucket, but not before the floor, and in the same bucket if that is why the open one
-- ends. Returns its index, and the newest time of the log with the run.
local function open_segment(call, log, name, start, count, newest, bytes, is_full)
  local h, span = redis.call('HMGET', log, 't', unpack(OPEN)), call.span
  local more = redis.call('HMGET', log, 'i', 'o', 'x')
  local index = tonumber(more[1] or '-1')
  newest = math.max(newest, tonumber(h[1] or '0'))
  if h[2] then
    local row = open_row(h, is_full and SEALED or RAW)
    newest = math.max(newest, row[8])
    redis.call('HSET', log, 's' .. more[1], cmsgpack.pack(row))
    if start < row[1] + row[2] then start, span = row[1], row[2] end
  else
    call.opened[#call.opened + 1] = 0
    call.opened[#call.opened + 1] = name
    if more[1] or more[2] or more[3] then redis.call('PERSIST', log) end
    if more[2] and start < tonumber(more[2]) then start = math.ceil(more[2] / span) * span end
    if index < 0 then
      if call.gone == nil then call.gone = redis.call('GET', call.tag .. ':gone:' .. call.view) end
      if call.gone then redis.call('HSET', log, 'x', call.gone) end
    end
  end
  local at, t = text(index + 1), text(newest)
  redis.call('HSET', log, 'i', at, 'b', text(start), 'w', text(span), 'e', call.epoch, 'f', text(call.number + 1), 't', t,
    'p', text(call.number + count) .. ' ' .. text(count) .. ' ' .. text(bytes) .. ' ' .. t)
  return at, t
end

-- Appends one run to a log. A run that begins before the end of the open bucket goes there; otherwise a new segment is
-- opened in its own bucket, but not before the floor nor after the latest time allowed. A new epoch opens one in the same bucket;
-- so does, if call.most is given, the first run of a period when the open one has so many entries: it is sealed, to be packed soon.
-- Most calls append to most of their logs once, so three commands for a run are what the store's time goes into.
local function append(call, name, start, count, newest, run)
  local log = call.logs .. name
  local h = redis.call('HMGET', log, 'p', 'b', 'w', 'e', 'i')
  local index, last = h[5], text(call.number + count)
  local events, bytes, seen
  if h[1] then events, bytes, seen = string.match(h[1], '^%d+ (%d+) (%d+) (%d+)$') end
  local at = tonumber(newest)
  -- A record from the future must not make the log look young for ever.
  if at > call.latest then at, newest = call.latest, text(call.latest) end
  local is_full = call.most and seen and math.floor(at / call.period) > math.floor(seen / call.period)
    and redis.call('XLEN', call.segments .. index .. ':' .. name) >= call.most
  start = math.min(start, call.last_start)
  if not is_full and events and start < h[2] + h[3] and h[4] == call.epoch then
    if at < tonumber(seen) then newest = seen end
    redis.call('HSET', log, 'p', last .. ' ' .. text(events + count) .. ' ' .. text(bytes + #run) .. ' ' .. newest)
  else
    index, newest = open_segment(call, log, name, start, tonumber(count), at, #run, is_full)
  end
  redis.call('XADD', call.segments .. index .. ':' .. name, last .. '-' .. count, 'r', run, 't', newest)
  call.number = call.number + count
end

-- Closes the open segment before its bucket ends, unless the bucket lies in the future: that one was opened by an
-- earlier seal, and sealing it too would run ahead of the calendar.
local function seal(tag, view, name, now)
  local log = log_key(tag, view, name)
  local h = redis.call('HMGET', log, 't', unpack(OPEN))
  if not h[2] or tonumber(h[2]) > now then return end
  local row = open_row(h, SEALED)
  redis.call('HSET', log, 's' .. redis.call('HGET', log, 'i'), cmsgpack.pack(row))
  end_open(log, row)
  raise_floor(log, row[1] + row[2])
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

-- Lua hands over a limited number of arguments at once.
local MOST = 1000

-- Calls a command with a key and many further arguments; pairs stay together.
local function call_many(command, key, list)
  for first = 1, #list, MOST do redis.call(command, key, unpack(list, first, math.min(first + MOST - 1, #list))) end
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

-- Items of apply that views define, by their letter. Each gets the call: tag, view, source, mark, epoch, number.
-- GUARDED: items that compare before anything is written, and come first. read(args, i) returns the item and where the next
--   one begins; holds(call, item) is false if the stored values are not those seen; write(call, item) writes it.
-- ITEMS: writes the item at i and returns where the next one begins. ENDINGS: called when all items are written.
local GUARDED, ITEMS, ENDINGS = {}, {}, {}

-- What upkeep needs to make room must also work in a store that is full.
local function register_for_full(name, callback)
  redis.register_function{function_name = name, callback = callback, flags = {'allow-oom'}}
end

register_for_full('tailrace_begin_VERSION', begin)
register_for_full('tailrace_fence_VERSION', fence)
redis.register_function('tailrace_advance_VERSION', advance)
redis.register_function('tailrace_adopt_VERSION', adopt)
redis.register_function('tailrace_enlist_VERSION', enlist)
