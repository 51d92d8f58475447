-- Searches: their registry, which is in shard 0, and the payloads of what they found, which are in the shards of sources.

-- Popularity is counted in windows that do not overlap, and decays: what is a day old counts half.
local WINDOW = 600000
local HALF_LIFE = 144
-- So long processes are told which of their connections lost a search: again and again, since an answer may be lost.
local TOLD = 60000
-- Searches that one call ends at most.
local ENDED = 100

-- Counts connections of a search in a window. Its use is the sum over all windows, each halved for every day since; kept as
-- its logarithm with the clock as the origin, which need not be touched as time goes by, and is always in the right order.
local function popular(tag, id, n, window)
  local key, uses = tag .. ':popular:' .. text(window), tag .. ':uses'
  redis.call('HINCRBY', key, id, n)
  redis.call('PEXPIRE', key, 2 * WINDOW)
  local use = window / HALF_LIFE + math.log(n) / math.log(2)
  local known = tonumber(redis.call('ZSCORE', uses, id) or nil)
  if known then
    local high, low = math.max(use, known), math.min(use, known)
    use = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
  end
  redis.call('ZADD', uses, string.format('%.17g', use), id)
end

-- Ends the life of a search; answers its name, or nothing. What it leaves, its logs, is dropped by whoever reads dropping.
local function end_life(tag, id)
  local known = redis.call('HGET', tag .. ':searches', id)
  redis.call('ZREM', tag .. ':idle', id)
  redis.call('ZREM', tag .. ':uses', id)
  if not known then return end
  local life, numbers = id .. '.' .. string.match(known, '^%d+'), {}
  for _, stretch in ipairs(redis.call('LRANGE', tag .. ':stretches:' .. life, 0, -1)) do
    local number = string.match(stretch, '^%d+')
    numbers[#numbers + 1] = number
    redis.call('ZREM', tag .. ':scanning', life .. ' ' .. number)
  end
  redis.call('HDEL', tag .. ':searches', id)
  redis.call('HDEL', tag .. ':pins', life)
  redis.call('DEL', tag .. ':stretches:' .. life, tag .. ':scanned:' .. life, tag .. ':positions:' .. id)
  redis.call('DEL', tag .. ':read:' .. life, tag .. ':lost:' .. life)
  redis.call('HSET', tag .. ':dropping', life, table.concat(numbers, ' '))
  redis.call('INCR', tag .. ':searches:version')
  return life
end

-- Answers the searches that nobody has followed for so long, the least used first; kept is what is promised to readers.
local function past_promise(tag, kept)
  local found = redis.call('ZRANGEBYSCORE', tag .. ':idle', '-inf', text(milliseconds() - kept))
  local uses = {}
  for _, id in ipairs(found) do uses[id] = tonumber(redis.call('ZSCORE', tag .. ':uses', id) or '0') end
  table.sort(found, function(a, b) return uses[a] < uses[b] or (uses[a] == uses[b] and a < b) end)
  return found
end

-- register(id, search, ms, most, kept ms): a search with its life; one that is known keeps its life. Answers number, ms when it
-- began, and whether it is new; or full, if there are most and all of them are followed or promised. Whoever reads the registry
-- looks at its version first.
local function register(keys, args)
  local tag, id = keys[1], args[1]
  local known = redis.call('HGET', tag .. ':searches', id)
  if not known and args[4] and redis.call('HLEN', tag .. ':searches') >= tonumber(args[4]) then
    local least = past_promise(tag, args[5])[1]
    if not least then return {'full'} end
    end_life(tag, least)
  end
  if redis.call('HEXISTS', tag .. ':followers', id) == 0 then
    redis.call('ZADD', tag .. ':idle', text(milliseconds()), id)
  end
  if known then
    local number, since = string.match(known, '^(%d+) (%d+) ')
    return {number, since, 0}
  end
  local number = text(redis.call('INCR', tag .. ':lives'))
  redis.call('HSET', tag .. ':searches', id, number .. ' ' .. args[3] .. ' ' .. args[2])
  redis.call('HSET', tag .. ':past', number, id)
  redis.call('INCR', tag .. ':searches:version')
  return {number, args[3], 1}
end

-- Whether a life is not over.
local function is_alive(tag, life)
  local id, number = string.match(life, '^(.*)%.(%d+)$')
  local known = redis.call('HGET', tag .. ':searches', id)
  return known and string.match(known, '^%d+') == number
end

-- pin(life, pins): where the live matches of a life begin; the first to say so is right. Nothing is kept for one that is over.
local function pin(keys, args)
  local pins = keys[1] .. ':pins'
  if not is_alive(keys[1], args[1]) then return args[2] end
  redis.call('HSETNX', pins, args[1], args[2])
  return redis.call('HGET', pins, args[1])
end

-- extend(life, stretches seen, ms, stretch): a stretch of the past to be scanned, unless another was added meanwhile, or the
-- life is over.
local function extend(keys, args)
  local tag = keys[1]
  if not is_alive(tag, args[1]) then return {'over'} end
  local stretches = tag .. ':stretches:' .. args[1]
  if redis.call('LLEN', stretches) ~= tonumber(args[2]) then return {'moved'} end
  local number = text(redis.call('INCR', tag .. ':lives'))
  redis.call('RPUSH', stretches, number .. ' ' .. args[3] .. ' ' .. args[4])
  redis.call('ZADD', tag .. ':scanning', args[3], args[1] .. ' ' .. number)
  return {'ok', number}
end

-- scanned(life, stretch): a stretch is done with. Nothing is kept for a life that is over.
local function scanned(keys, args)
  redis.call('ZREM', keys[1] .. ':scanning', args[1] .. ' ' .. args[2])
  if is_alive(keys[1], args[1]) then redis.call('SADD', keys[1] .. ':scanned:' .. args[1], args[2]) end
  return 'ok'
end

-- place(id, client, cursor): where a client that has a name is. Nothing is kept for a search that is forgotten.
local function place(keys, args)
  if redis.call('HEXISTS', keys[1] .. ':searches', args[1]) == 0 then return 0 end
  redis.call('HSET', keys[1] .. ':positions:' .. args[1], args[2], args[3])
  return 1
end

-- noted(view, driver epoch, life, stretch, bytes, (source, first, until, reason)…): a chunk was read for a stretch; and what Kafka
-- no longer had of it. A driver that was overtaken has come late to what another one read in time.
local function noted(keys, args)
  local tag, life, stretch = keys[1], args[3], args[4]
  local owner = fenced(tag, args[1], tonumber(args[2]))
  if owner then return {'stale', text(owner)} end
  if not is_alive(tag, life) then return {'over'} end
  redis.call('HINCRBY', tag .. ':read:' .. life, stretch, args[5])
  for i = 6, #args, 4 do
    redis.call('HSET', tag .. ':lost:' .. life, stretch .. ' ' .. args[i] .. ' ' .. args[i + 1], args[i + 2] .. ' ' .. args[i + 3])
  end
  return {'ok'}
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

-- Says that connections follow a search, or no longer do: it is idle from the moment on that none does.
local function followed(tag, id, by)
  if redis.call('HINCRBY', tag .. ':followers', id, by) > 0 then
    redis.call('ZREM', tag .. ':idle', id)
    return
  end
  redis.call('HDEL', tag .. ':followers', id)
  if redis.call('HEXISTS', tag .. ':searches', id) == 1 then
    redis.call('ZADD', tag .. ':idle', text(milliseconds()), id)
  end
end

-- heartbeat(process, facts, begins): a service process is alive, by this server's clock. One that does not begin and is not
-- known was buried, and is refused for ever, since names are used once. Answers the window that it is, and the connections
-- whose search was ended since. Each connection is counted once in a window: by the first heartbeat there, or as it begins.
local function heartbeat(keys, args)
  local tag, process, now = keys[1], args[1], milliseconds()
  local before = redis.call('ZSCORE', tag .. ':processes', process)
  if not before and args[3] ~= '1' then return {'buried'} end
  redis.call('ZADD', tag .. ':processes', text(now), process)
  redis.call('HSET', tag .. ':process', process, args[2])
  local window, counts = math.floor(now / WINDOW), {}
  if before and math.floor(before / WINDOW) < window then
    for _, lease in ipairs(redis.call('HVALS', tag .. ':leases:' .. process)) do
      local id, began = string.match(lease, '^(%S+) (%d+)$')
      if tonumber(began) < window then counts[id] = (counts[id] or 0) + 1 end
    end
    for id, n in pairs(counts) do popular(tag, id, n, window) end
  end
  local answer = {'ok', text(window)}
  for _, connection in ipairs(redis.call('LRANGE', tag .. ':lapsed:' .. process, 0, -1)) do
    answer[#answer + 1] = connection
  end
  return answer
end

-- follow(process, connection, id, life, facts, window): a connection follows a life of a search, or whichever there is, for as
-- long as its process is alive. It was counted up to a window already, if it followed before under another name.
local function follow(keys, args)
  local tag, process, id, window = keys[1], args[1], args[3], math.floor(milliseconds() / WINDOW)
  if not redis.call('ZSCORE', tag .. ':processes', process) then return {'buried'} end
  local known = redis.call('HGET', tag .. ':searches', id)
  if not known or (args[4] and args[4] ~= '' and args[4] ~= string.match(known, '^%d+')) then return {'forgotten'} end
  if redis.call('HSETNX', tag .. ':leases:' .. process, args[2], id .. ' ' .. text(window)) == 1 then
    redis.call('HSET', tag .. ':connections:' .. id, process .. ' ' .. args[2], args[5] or '{}')
    followed(tag, id, 1)
    if tonumber(args[6] or '0') < window then popular(tag, id, 1, window) end
  end
  return {'ok', text(window)}
end

-- unfollow(process, connection): it follows no more.
local function unfollow(keys, args)
  local tag, process, window = keys[1], args[1], math.floor(milliseconds() / WINDOW)
  local lease = redis.call('HGET', tag .. ':leases:' .. process, args[2])
  if not lease then return 0 end
  local id, began = string.match(lease, '^(%S+) (%d+)$')
  redis.call('HDEL', tag .. ':leases:' .. process, args[2])
  redis.call('HDEL', tag .. ':connections:' .. id, process .. ' ' .. args[2])
  followed(tag, id, -1)
  local beat = tonumber(redis.call('ZSCORE', tag .. ':processes', process) or '0')
  if tonumber(began) < window and math.floor(beat / WINDOW) < window then popular(tag, id, 1, window) end
  return 1
end

-- Adds to the list that a table has under a name.
local function add(lists, name, value)
  lists[name] = lists[name] or {}
  lists[name][#lists[name] + 1] = value
end

-- bury(silent ms): ends the leases of processes that were silent for so long; answers their names.
local function bury(keys, args)
  local tag, now = keys[1], milliseconds()
  local dead = redis.call('ZRANGEBYSCORE', tag .. ':processes', '-inf', text(now - args[1]))
  for _, process in ipairs(dead) do
    local leases, ended = redis.call('HGETALL', tag .. ':leases:' .. process), {}
    for i = 1, #leases, 2 do add(ended, string.match(leases[i + 1], '^%S+'), process .. ' ' .. leases[i]) end
    for id, connections in pairs(ended) do
      call_many('HDEL', tag .. ':connections:' .. id, connections)
      followed(tag, id, -#connections)
    end
    redis.call('DEL', tag .. ':leases:' .. process, tag .. ':lapsed:' .. process)
    redis.call('ZREM', tag .. ':processes', process)
    redis.call('HDEL', tag .. ':process', process)
  end
  return dead
end

-- forget(kept ms, kept at most ms, most): ends searches that nobody has followed for longer than is promised to readers: all
-- that are too old, and of the others so many that no more than most are left, the least used first. Answers their lives,
-- a hundred at most.
local function forget(keys, args)
  local tag, oldest, ended = keys[1], milliseconds() - args[2], {}
  local found = past_promise(tag, args[1])
  local left = #found
  for pass = 1, 2 do
    for at, id in ipairs(found) do
      if #ended == ENDED then return ended end
      if id and (pass == 2 and left > tonumber(args[3]) or tonumber(redis.call('ZSCORE', tag .. ':idle', id)) <= oldest) then
        ended[#ended + 1] = end_life(tag, id)
        found[at], left = false, left - 1
      end
    end
  end
  return ended
end

-- end(id, force): ends the life of a search now. Answers its life and how many connections followed it, which are told by their
-- heartbeats; refuses with followed, and how many, unless it is forced; or answers that it is unknown.
local function end_now(keys, args)
  local tag, id = keys[1], args[1]
  if redis.call('HEXISTS', tag .. ':searches', id) == 0 then return {'unknown'} end
  local connections = redis.call('HKEYS', tag .. ':connections:' .. id)
  if #connections > 0 and args[2] ~= '1' then return {'followed', #connections} end
  local ended = {}
  for _, each in ipairs(connections) do
    local process, connection = string.match(each, '^(%S+) (%d+)$')
    add(ended, process, connection)
  end
  for process, numbers in pairs(ended) do
    call_many('HDEL', tag .. ':leases:' .. process, numbers)
    call_many('RPUSH', tag .. ':lapsed:' .. process, numbers)
    redis.call('PEXPIRE', tag .. ':lapsed:' .. process, TOLD)
  end
  redis.call('UNLINK', tag .. ':connections:' .. id)
  redis.call('HDEL', tag .. ':followers', id)
  return {'ok', end_life(tag, id), #connections}
end

-- drop(view, name, marks…): removes a log with all its segments, and marks of the view.
local function drop(keys, args)
  local tag, view, name = keys[1], args[1], args[2]
  local log = log_key(tag, view, name)
  local newest = tonumber(redis.call('HGET', log, 'i') or '-1')
  for index = tonumber(redis.call('HGET', log, 'a') or '0'), newest do
    redis.call('UNLINK', segment_key(tag, view, text(index), name))
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
redis.register_function('tailrace_place_VERSION', place)
redis.register_function('tailrace_noted_VERSION', noted)
redis.register_function('tailrace_keep_VERSION', keep)
redis.register_function('tailrace_heartbeat_VERSION', heartbeat)
redis.register_function('tailrace_follow_VERSION', follow)
redis.register_function('tailrace_unfollow_VERSION', unfollow)
redis.register_function('tailrace_bury_VERSION', bury)
redis.register_function('tailrace_forget_VERSION', forget)
redis.register_function('tailrace_end_VERSION', end_now)
redis.register_function('tailrace_drop_VERSION', drop)
