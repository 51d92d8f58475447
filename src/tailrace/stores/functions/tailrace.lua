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

-- The fields of a log's hash that describe its current segment; earlier ones are kept in s<index>.
local CURRENT = {'i', 'b', 'e', 'f', 'l', 'c', 'z', 't', 'o'}

-- Appends one run to a log. The bucket is clamped to [floor, limit]; a new bucket or epoch opens a new segment.
local function append(tag, view, epoch, limit, number, name, bucket, count, newest, run)
  local log = tag .. ':log:' .. view .. ':' .. name
  local h = redis.call('HMGET', log, unpack(CURRENT))
  bucket = math.min(bucket, limit)
  local index, last, newest_seen = tonumber(h[1] or '-1'), number + count, tonumber(h[8] or '0')
  if h[2] then bucket = math.max(bucket, tonumber(h[2])) end
  if h[9] then bucket = math.max(bucket, tonumber(h[9])) end
  if newest < newest_seen then newest = newest_seen end
  local events, size = count, #run
  if index < 0 or tonumber(h[2]) ~= bucket or h[3] ~= epoch then
    if index < 0 then
      redis.call('ZADD', tag .. ':names:' .. view, 0, name)
    else
      redis.call('HSET', log, 's' .. h[1], table.concat(h, ' ', 2, 8))
    end
    index = index + 1
    redis.call('HSET', log, 'i', text(index), 'b', text(bucket), 'e', epoch, 'f', text(number + 1),
      'l', text(last), 'c', text(events), 'z', text(size), 't', text(newest))
  else
    redis.call('HSET', log, 'l', text(last), 'c', text(h[6] + events), 'z', text(h[7] + size), 't', text(newest))
  end
  redis.call('XADD', tag .. ':seg:' .. view .. ':' .. text(index) .. ':' .. name, text(last) .. '-' .. text(count),
    'r', run, 't', text(newest))
  return last
end

-- How many names and views one entry of the tail holds.
local TOLD = 1000

-- apply(view, driver epoch, source, mark seen, new mark, bucket span ms, future limit ms, tail length, items…)
--   A name bucket count newest run   append a run to a log
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
  local now = redis.call('TIME')
  local limit = math.floor((now[1] * 1000 + args[7]) / args[6])
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, appended, touched, seen = number, 0, {}, {}
  local i, n = 9, #args
  while i <= n do
    local kind = args[i]
    if kind == 'A' then
      local count = tonumber(args[i + 3])
      number = append(tag, view, epoch, limit, number, args[i + 1], tonumber(args[i + 2]), count,
        tonumber(args[i + 4]), args[i + 5])
      appended = appended + count
      if not seen[args[i + 1]] then
        seen[args[i + 1]] = true
        touched[#touched + 1] = args[i + 1]
        touched[#touched + 1] = view
      end
      i = i + 6
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

redis.register_function('tailrace_begin_VERSION', begin)
redis.register_function('tailrace_fence_VERSION', fence)
redis.register_function('tailrace_apply_VERSION', apply)
redis.register_function('tailrace_advance_VERSION', advance)
redis.register_function('tailrace_adopt_VERSION', adopt)
redis.register_function('tailrace_enlist_VERSION', enlist)
