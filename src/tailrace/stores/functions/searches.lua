-- Searches: their registry, which is in shard 0, and the payloads of what they found, which are in the shards of sources.

-- register(id, search, ms): a search with its life; one that is known keeps its life. Answers number, ms when it began, and
-- whether it is new. Whoever reads the registry looks at its version first.
local function register(keys, args)
  local tag = keys[1]
  local known = redis.call('HGET', tag .. ':searches', args[1])
  redis.call('ZADD', tag .. ':used', args[3], args[1])
  if known then
    local number, since = string.match(known, '^(%d+) (%d+) ')
    return {number, since, 0}
  end
  local number = text(redis.call('INCR', tag .. ':lives'))
  redis.call('HSET', tag .. ':searches', args[1], number .. ' ' .. args[3] .. ' ' .. args[2])
  redis.call('HSET', tag .. ':past', number, args[1])
  redis.call('INCR', tag .. ':searches:version')
  return {number, args[3], 1}
end

-- pin(life, pins): where the live matches of a life begin; the first to say so is right.
local function pin(keys, args)
  local pins = keys[1] .. ':pins'
  redis.call('HSETNX', pins, args[1], args[2])
  return redis.call('HGET', pins, args[1])
end

-- extend(life, stretches seen, ms, stretch): a stretch of the past to be scanned, unless another was added meanwhile.
local function extend(keys, args)
  local tag = keys[1]
  local stretches = tag .. ':stretches:' .. args[1]
  if redis.call('LLEN', stretches) ~= tonumber(args[2]) then return {'moved'} end
  local number = text(redis.call('INCR', tag .. ':lives'))
  redis.call('RPUSH', stretches, number .. ' ' .. args[3] .. ' ' .. args[4])
  redis.call('ZADD', tag .. ':scanning', args[3], args[1] .. ' ' .. number)
  return {'ok', number}
end

-- scanned(life, stretch): a stretch is done with.
local function scanned(keys, args)
  redis.call('ZREM', keys[1] .. ':scanning', args[1] .. ' ' .. args[2])
  redis.call('SADD', keys[1] .. ':scanned:' .. args[1], args[2])
  return 'ok'
end

-- keep(shelf, most bytes, ms, last offset, records, run): what matched records say, once for all searches, for a while. The
-- oldest go when there are too many bytes; what does not lie behind the last is not kept: it is in Kafka.
local function keep(keys, args)
  local key, sizes = keys[1] .. ':kept:' .. args[1], keys[1] .. ':kept'
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if last and tonumber(string.match(last[1], '^%d+')) >= tonumber(args[4]) then return 0 end
  if not last then redis.call('HDEL', sizes, args[1]) end
  redis.call('XADD', key, args[4] .. '-' .. args[5], 'r', args[6])
  redis.call('PEXPIRE', key, args[3])
  local size = redis.call('HINCRBY', sizes, args[1], #args[6])
  while size > tonumber(args[2]) do
    local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if not oldest then break end
    redis.call('XDEL', key, oldest[1])
    size = redis.call('HINCRBY', sizes, args[1], -#oldest[2][2])
  end
  return 1
end

-- How long the name of a process that was buried is remembered: longer than any pause.
local REMEMBERED = 86400000
-- Popularity is counted in windows that do not overlap.
local WINDOW = 600000

local function followed(tag, id, by)
  if redis.call('HINCRBY', tag .. ':followers', id, by) <= 0 then redis.call('HDEL', tag .. ':followers', id) end
end

-- Counts a connection of a search in the window that it is now.
local function popular(tag, id, now)
  local key = tag .. ':popular:' .. text(math.floor(now / WINDOW))
  redis.call('HINCRBY', key, id, 1)
  redis.call('PEXPIRE', key, 2 * WINDOW)
end

-- heartbeat(process, facts): a service process is alive, by this server's clock. One that was buried is refused.
local function heartbeat(keys, args)
  local tag, now = keys[1], milliseconds()
  if redis.call('SISMEMBER', tag .. ':buried', args[1]) == 1 then return 'buried' end
  local before = redis.call('ZSCORE', tag .. ':processes', args[1])
  redis.call('ZADD', tag .. ':processes', text(now), args[1])
  redis.call('HSET', tag .. ':process', args[1], args[2])
  if before and math.floor(before / WINDOW) < math.floor(now / WINDOW) then
    for _, id in ipairs(redis.call('HVALS', tag .. ':leases:' .. args[1])) do popular(tag, id, now) end
  end
  return 'ok'
end

-- follow(process, connection, id): a connection follows a search for as long as its process is alive.
local function follow(keys, args)
  local tag, now = keys[1], milliseconds()
  if redis.call('SISMEMBER', tag .. ':buried', args[1]) == 1 then return 'buried' end
  if redis.call('HEXISTS', tag .. ':searches', args[3]) == 0 then return 'forgotten' end
  if redis.call('HSET', tag .. ':leases:' .. args[1], args[2], args[3]) == 1 then
    followed(tag, args[3], 1)
    popular(tag, args[3], now)
  end
  redis.call('ZADD', tag .. ':used', text(now), args[3])
  return 'ok'
end

-- unfollow(process, connection): it follows no more.
local function unfollow(keys, args)
  local tag = keys[1]
  local id = redis.call('HGET', tag .. ':leases:' .. args[1], args[2])
  if not id then return 0 end
  redis.call('HDEL', tag .. ':leases:' .. args[1], args[2])
  followed(tag, id, -1)
  redis.call('ZADD', tag .. ':used', text(milliseconds()), id)
  return 1
end

-- bury(silent ms): ends the leases of processes that were silent for so long; answers their names.
local function bury(keys, args)
  local tag, now = keys[1], milliseconds()
  local dead = redis.call('ZRANGEBYSCORE', tag .. ':processes', '-inf', text(now - args[1]))
  for _, process in ipairs(dead) do
    for _, id in ipairs(redis.call('HVALS', tag .. ':leases:' .. process)) do followed(tag, id, -1) end
    redis.call('DEL', tag .. ':leases:' .. process)
    redis.call('ZREM', tag .. ':processes', process)
    redis.call('HDEL', tag .. ':process', process)
    redis.call('SADD', tag .. ':buried', process)
    redis.call('PEXPIRE', tag .. ':buried', REMEMBERED)
  end
  return dead
end

-- forget(id, kept ms): ends the life of a search that nobody follows and nobody asked for in that time. Answers its life and the
-- numbers of its stretches, or nothing.
local function forget(keys, args)
  local tag, id = keys[1], args[1]
  local used = redis.call('ZSCORE', tag .. ':used', id)
  if redis.call('HEXISTS', tag .. ':followers', id) == 1 then return {} end
  if used and tonumber(used) > milliseconds() - args[2] then return {} end
  local known = redis.call('HGET', tag .. ':searches', id)
  redis.call('ZREM', tag .. ':used', id)
  if not known then return {} end
  local life = id .. '.' .. string.match(known, '^%d+')
  local answer = {life}
  for _, stretch in ipairs(redis.call('LRANGE', tag .. ':stretches:' .. life, 0, -1)) do
    local number = string.match(stretch, '^%d+')
    answer[#answer + 1] = number
    redis.call('ZREM', tag .. ':scanning', life .. ' ' .. number)
  end
  redis.call('HDEL', tag .. ':searches', id)
  redis.call('HDEL', tag .. ':pins', life)
  redis.call('DEL', tag .. ':stretches:' .. life, tag .. ':scanned:' .. life, tag .. ':positions:' .. id)
  redis.call('INCR', tag .. ':searches:version')
  return answer
end

-- drop(view, name, marks…): removes a log with all its segments, and marks of the view.
local function drop(keys, args)
  local tag, view, name = keys[1], args[1], args[2]
  local log = log_key(tag, view, name)
  local newest = tonumber(redis.call('HGET', log, 'i') or '-1')
  for index = tonumber(redis.call('HGET', log, 'a') or '0'), newest do
    redis.call('DEL', segment_key(tag, view, text(index), name))
  end
  redis.call('DEL', log)
  redis.call('ZREM', tag .. ':names:' .. view, name)
  for i = 3, #args do redis.call('HDEL', tag .. ':marks:' .. view, args[i]) end
  return 'ok'
end

redis.register_function('tailrace_register_VERSION', register)
redis.register_function('tailrace_pin_VERSION', pin)
redis.register_function('tailrace_extend_VERSION', extend)
redis.register_function('tailrace_scanned_VERSION', scanned)
redis.register_function('tailrace_keep_VERSION', keep)
redis.register_function('tailrace_heartbeat_VERSION', heartbeat)
redis.register_function('tailrace_follow_VERSION', follow)
redis.register_function('tailrace_unfollow_VERSION', unfollow)
redis.register_function('tailrace_bury_VERSION', bury)
redis.register_function('tailrace_forget_VERSION', forget)
redis.register_function('tailrace_drop_VERSION', drop)
