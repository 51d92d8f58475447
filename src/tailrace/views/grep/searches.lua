-- Searches: their registry, in shard 0, and the matched records that are kept, in the home shards of partitions.

-- Popularity is counted in windows of ten minutes and decays: a count that is a day old has half its weight.
local WINDOW = 600000
local HALF_LIFE = 144
-- For so long, heartbeats tell a process which of its connections lost a search; repeatedly, since an answer may be lost.
local TOLD = 60000
-- Most searches that one call ends.
local ENDED = 100

-- Counts connections of a search in a window. The use of a search is the sum over all windows, each halved for every day
-- since. It is stored as a logarithm relative to the clock, so that it needs no update as time passes and sorts correctly.
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

-- Ends the life of a search; returns its name, or nothing. Its logs are listed in dropping, for the watchdog to drop.
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

-- Returns the searches without readers for longer than the promised time, kept, the least used first.
local function past_promise(tag, kept)
  local found = redis.call('ZRANGEBYSCORE', tag .. ':idle', '-inf', text(milliseconds() - kept))
  local uses = {}
  for _, id in ipairs(found) do uses[id] = tonumber(redis.call('ZSCORE', tag .. ':uses', id) or '0') end
  table.sort(found, function(a, b) return uses[a] < uses[b] or (uses[a] == uses[b] and a < b) end)
  return found
end

-- register(id, search, ms, most, kept ms): returns the life of a search, a new one if it has none: its number, when it began,
-- and whether it is new. Answers full if there are most searches and all of them have readers or are within the promised time.
-- Readers of the registry read its version first.
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

-- Returns whether a life has not ended.
local function is_alive(tag, life)
  local id, number = string.match(life, '^(.*)%.(%d+)$')
  local known = redis.call('HGET', tag .. ':searches', id)
  return known and string.match(known, '^%d+') == number
end

-- pin(life, pins): pins the begin of a life's live matches; only the first call does. Nothing is stored for an ended life.
local function pin(keys, args)
  local pins = keys[1] .. ':pins'
  if not is_alive(keys[1], args[1]) then return args[2] end
  redis.call('HSETNX', pins, args[1], args[2])
  return redis.call('HGET', pins, args[1])
end

-- extend(life, stretches seen, ms, stretch): adds a stretch to scan, unless another was added meanwhile or the life has ended.
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

-- scanned(life, stretch): marks a stretch as scanned. Nothing is stored for an ended life.
local function scanned(keys, args)
  redis.call('ZREM', keys[1] .. ':scanning', args[1] .. ' ' .. args[2])
  if is_alive(keys[1], args[1]) then redis.call('SADD', keys[1] .. ':scanned:' .. args[1], args[2]) end
  return 'ok'
end

-- place(id, client, cursor): stores the cursor of a named client. Nothing is stored for a search that has ended.
local function place(keys, args)
  if redis.call('HEXISTS', keys[1] .. ':searches', args[1]) == 0 then return 0 end
  redis.call('HSET', keys[1] .. ':positions:' .. args[1], args[2], args[3])
  return 1
end

-- noted(view, driver epoch, life, stretch, bytes, (partition, first, until, reason)…): records the bytes read for a stretch and
-- the offsets that Kafka no longer had. Refuses a stale driver: its successor may have read these offsets in time.
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

-- keep(shelf, most bytes, ms, last offset, records, run): keeps matched records, once for all searches, for a while. Drops the
-- oldest runs beyond the bytes. Ignores a run that does not lie behind the last one: feeds read it from Kafka.
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

-- Changes the number of connections that follow a search; without any the search is idle.
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

-- heartbeat(process, facts, begins): records that a service process is alive, by this server's clock. A name that is unknown
-- and does not begin was buried; it is refused for ever, since names are used once. Answers the current window and the
-- connections whose search was ended. Each connection counts once per window: at the first heartbeat in it, or when it begins.
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

-- follow(process, connection, id, life, facts, window): leases a life of a search, or the current one, to a connection for as
-- long as its process is alive. The connection was counted up to window already, under an earlier name of its process.
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

-- unfollow(process, connection): releases the lease of a connection.
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

-- Appends to the list under a name.
local function add(lists, name, value)
  lists[name] = lists[name] or {}
  lists[name][#lists[name] + 1] = value
end

-- bury(silent ms): ends the leases of processes that were silent for so long; returns their names.
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

-- forget(kept ms, kept at most ms, most): ends searches without readers for longer than the promised time, kept: all that are
-- too old, and of the others the least used until no more than most are left. Returns their lives, at most a hundred.
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

-- end(id, force): ends the life of a search. Returns its life and the number of its connections, which learn it from their
-- heartbeats. Unless forced, refuses a search that has connections: followed and their number. Answers unknown without one.
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
