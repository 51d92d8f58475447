-- Tags: the progress of each source in each tag, the floors of partitions (key :times:), conflicts and erasures.

-- Reads an N item at i: floor seen, new floor, count of tags; then for each tag: tag, n, and n times source, seen, value.
-- Returns the item and the index of the next one.
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

-- Returns true if the partition's floor and the progress of all sources are as seen; '' stands for none.
local function have_numbers(tag, view, partition, item)
  local time = redis.call('HGET', tag .. ':times:' .. view, partition)
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

local function write_numbers(tag, view, partition, mark, item)
  redis.call('HSET', tag .. ':times:' .. view, partition, item.time .. ' ' .. mark)
  for _, each in ipairs(item.tags) do call_many('HSET', tag .. ':numbers:' .. each.tag, each.pairs) end
end

-- N seen floor tags (tag n (source seen value)…)…    write the partition's floor and the progress of sources, if all are
--                                  as seen
GUARDED.N = {
  read = read_numbers,
  holds = function(call, item) return have_numbers(call.tag, call.view, call.source, item) end,
  write = function(call, item) write_numbers(call.tag, call.view, call.source, call.mark, item) end,
}

-- Length of the stream of conflicts, about.
local CONFLICTS = 1000

-- K text                           store a conflict
function ITEMS.K(call, args, i)
  redis.call('XADD', call.tag .. ':conflicts', 'MAXLEN', '~', CONFLICTS, '*', 'c', args[i + 1])
  return i + 2
end

-- lift(view, driver epoch, (partition, ms)…): raises the floors of partitions that are applied up to these times; later
-- events get no earlier timeuuid.
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

-- introduce(view, driver epoch, partition…): gives partitions without a floor the lowest one, before their first row is
-- written to Cassandra; returns the floors of all.
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

-- clean(token, tag, source, value): stores the erasure of a source in a tag; an empty value deletes it.
local function clean(keys, args)
  local owner = fenced(keys[1], UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local key, tags = keys[1] .. ':cleaned:' .. args[2], keys[1] .. ':cleaned'
  if args[4] ~= '' then
    redis.call('HSET', key, args[3], args[4])
    redis.call('SADD', tags, args[2])
  else
    redis.call('HDEL', key, args[3])
    if redis.call('EXISTS', key) == 0 then redis.call('SREM', tags, args[2]) end
  end
  return {'ok'}
end

-- count_from(token, tag, (source, value)…): stores the progress of sources that have none in a tag yet.
local function count_from(keys, args)
  local owner = fenced(keys[1], UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  for i = 3, #args, 2 do redis.call('HSETNX', keys[1] .. ':numbers:' .. args[2], args[i], args[i + 1]) end
  return {'ok'}
end

redis.register_function('tailrace_lift_VERSION', lift)
redis.register_function('tailrace_introduce_VERSION', introduce)
redis.register_function('tailrace_clean_VERSION', clean)
redis.register_function('tailrace_count_from_VERSION', count_from)
