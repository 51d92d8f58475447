-- What a task has for a shard, in one call.

-- How many names and views one entry of the tail holds.
local TOLD = 1000

-- apply(view, driver epoch, source, mark seen, new mark, bucket span ms, future limit ms, tail length, items…)
--   A name start count newest run    append a run to a log; start is that of its bucket
--   R entries ms                     from here on, begin another segment with the first run of a period of so many ms, if the open
--                                    one has so many entries
--   S name                           seal the log's bucket
--   O id topic key value headers     put a message into the outbox
--   C field n                        add to a counter
--   T ms                             raise the source's running-maximum time
--   W name                           tell the followers of a log that lies elsewhere
-- and the items that views define (GUARDED, ITEMS).
-- Writes everything or nothing: a mark that is not the mark seen is refused with the stored one, a guarded item that does not
-- hold with the word conflict.
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
  local now, span = milliseconds(), tonumber(args[6])
  local latest, began = now + args[7], tonumber(redis.call('GET', tag .. ':number') or '0')
  local call = {tag = tag, view = view, source = source, mark = args[5], epoch = epoch, number = began, span = span,
    latest = latest, last_start = math.floor(latest / span) * span, opened = {}, logs = log_key(tag, view, ''),
    segments = tag .. ':seg:' .. view .. ':'}
  local guarded = {}
  while i <= n and GUARDED[args[i]] do
    local kind = GUARDED[args[i]]
    local item
    item, i = kind.read(args, i)
    if not kind.holds(call, item) then return {'conflict'} end
    guarded[#guarded + 1] = {kind.write, item}
  end
  for _, each in ipairs(guarded) do each[1](call, each[2]) end
  local appended, touched, seen = 0, {}, {}
  local function touch(name)
    if seen[name] then return end
    seen[name] = true
    touched[#touched + 1] = name
    touched[#touched + 1] = view
  end
  while i <= n do
    local kind = args[i]
    if kind == 'A' then
      append(call, args[i + 1], args[i + 2], args[i + 3], args[i + 4], args[i + 5])
      appended = appended + args[i + 3]
      touch(args[i + 1])
      i = i + 6
    elseif kind == 'R' then
      call.most, call.period = tonumber(args[i + 1]), tonumber(args[i + 2])
      i = i + 3
    elseif kind == 'W' then
      touch(args[i + 1])
      i = i + 2
    elseif kind == 'S' then
      seal(tag, view, args[i + 1], now)
      i = i + 2
    elseif kind == 'O' then
      call.number = send(tag, epoch, call.number, unpack(args, i + 1, i + 5))
      i = i + 6
    elseif kind == 'C' then
      redis.call('HINCRBY', tag .. ':counts:' .. view, args[i + 1], args[i + 2])
      i = i + 3
    elseif kind == 'T' then
      -- With the mark it holds at, so that the two are never read apart.
      local times = tag .. ':times:' .. view
      local known = redis.call('HGET', times, source)
      local newest = math.max(tonumber(args[i + 1]), known and tonumber(string.match(known, '^-?%d+')) or -1)
      redis.call('HSET', times, source, text(newest) .. ' ' .. args[5])
      i = i + 2
    else
      i = ITEMS[kind](call, args, i)
    end
  end
  for _, finish in pairs(ENDINGS) do finish(call) end
  if call.number > began then redis.call('SET', tag .. ':number', text(call.number)) end
  call_many('ZADD', tag .. ':names:' .. view, call.opened)
  if appended > 0 then redis.call('HINCRBY', tag .. ':counts:' .. view, 'stored', appended) end
  -- Lua hands over a limited number of arguments at once.
  for first = 1, #touched, TOLD do
    redis.call('XADD', tag .. ':tail', 'MAXLEN', '~', args[8], '*', unpack(touched, first, math.min(first + TOLD - 1, #touched)))
  end
  redis.call('HSET', marks, source, args[5])
  return {'ok', args[5]}
end

redis.register_function('tailrace_apply_VERSION', apply)
