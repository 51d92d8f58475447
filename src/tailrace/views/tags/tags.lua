-- Tags: how far sources of events have come in each tag, and the times that no event still to come is before.

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

redis.register_function('tailrace_lift_VERSION', lift)
redis.register_function('tailrace_introduce_VERSION', introduce)
