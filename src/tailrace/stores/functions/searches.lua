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

redis.register_function('tailrace_register_VERSION', register)
redis.register_function('tailrace_pin_VERSION', pin)
redis.register_function('tailrace_extend_VERSION', extend)
redis.register_function('tailrace_scanned_VERSION', scanned)
redis.register_function('tailrace_keep_VERSION', keep)
