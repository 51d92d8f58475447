-- The rota of one driver: which hand reads which partitions, and who has the baton.

-- A hand that has not rolled for so many ms is taken for dead: its successor, or another hand, begins without its word.
local SILENT = 1500

-- post(view, driver epoch, starts, label, offset…, gone, label…, field, value…): the driver writes its rota, and is heard.
--   starts    how many partitions with the offset up to which, not including it, everything is applied
--   gone      how many partitions that are on the rota no longer
--   value     '' takes a field off the rota; a hand that is not on it stops
-- The first call of an epoch begins a new rota. Answers stale with the epoch of a driver that has come since, or ok.
local function post(keys, args)
  local tag, view, epoch = keys[1], args[1], tonumber(args[2])
  local rota, hands, done = tag .. ':rota:' .. view, tag .. ':hands:' .. view, tag .. ':done:' .. view
  local owner = tonumber(redis.call('HGET', rota, 'epoch') or '0')
  if owner > epoch then return {'stale', text(owner)} end
  if owner < epoch then redis.call('DEL', rota, hands, done) end
  local first = 4 + 2 * tonumber(args[3])
  for i = 4, first - 1, 2 do redis.call('HSET', done, args[i], args[i + 1]) end
  local last = first + tonumber(args[first])
  for i = first + 1, last do redis.call('HDEL', done, args[i]) end
  redis.call('HSET', rota, 'epoch', args[2], 'beat', text(milliseconds()))
  for i = last + 1, #args, 2 do
    if args[i + 1] == '' then redis.call('HDEL', rota, args[i]) else redis.call('HSET', rota, args[i], args[i + 1]) end
  end
  return {'ok'}
end

-- roll(view, driver epoch, hand, token, version seen, ready, leaving, waiting, report, gave, labels given up…, label, offset…)
--   token     shift × 1000 + attempt; of two tasks with the same hand, the one with the higher token stays
--   ready     1 if a successor has its connections open and takes over as soon as it may
--   waiting   1 if the hand was refused a partition that another hand still has
--   gave      how many labels follow that the hand no longer reads; after them, pairs of a partition and the offset up to
--             which, not including it, the hand has applied everything
-- Answers unready: the store was emptied; stale: another driver has the rota; replaced: a later attempt has the hand; stop: the driver ends, or has nothing
-- for this hand any longer; relieved: a
-- successor is ready; wait: the predecessor still works; ok. With wait and ok come the version of the rota, how many ms ago the
-- driver was heard, and, if the version is another than the one seen or the hand waits: how many partitions it must wait for,
-- and a list of those that it may read (with wait: that it will).
local function roll(keys, args)
  local tag, view, hand, token = keys[1], args[1], args[3], tonumber(args[4])
  local rota, hands, done = tag .. ':rota:' .. view, tag .. ':hands:' .. view, tag .. ':done:' .. view
  local known = redis.call('HMGET', rota, 'epoch', 'version', 'stop', 'beat', 'hand:' .. hand)
  if not known[1] then return {'unready'} end
  if known[1] ~= args[2] then return {'stale', known[1]} end
  local now, first = milliseconds(), 11 + tonumber(args[10])
  for i = 11, first - 1 do
    if redis.call('HGET', hands, 'holder:' .. args[i]) == hand then redis.call('HDEL', hands, 'holder:' .. args[i]) end
  end
  for i = first, #args, 2 do
    local before = redis.call('HGET', done, args[i])
    -- A partition that the driver no longer lists is none of this rota.
    if before and tonumber(before) < tonumber(args[i + 1]) then redis.call('HSET', done, args[i], args[i + 1]) end
  end
  local function silent(other)
    local beat = redis.call('HGET', hands, 'beat:' .. other)
    return not beat or now - tonumber(beat) > SILENT
  end
  local current = tonumber(redis.call('HGET', hands, 'token:' .. hand))
  if current and current > token then return {'replaced'} end
  if args[7] == '1' then
    if current == token then redis.call('HDEL', hands, 'token:' .. hand, 'beat:' .. hand) end
    return {'left'}
  end
  if known[3] or not known[5] then return {'stop'} end
  local mine = cjson.decode(known[5])
  local age = text(now - tonumber(known[4]))
  if current ~= token then
    local attempt = current and math.floor(current / 1000) == math.floor(token / 1000)
    if current and not attempt and not silent(hand) then
      if args[6] == '1' then redis.call('HSET', hands, 'next:' .. hand, args[4]) end
      if args[5] == known[2] then return {'wait', known[2], age} end
      return {'wait', known[2], age, '0', mine}
    end
    redis.call('HSET', hands, 'token:' .. hand, args[4])
  end
  local successor = tonumber(redis.call('HGET', hands, 'next:' .. hand) or '0')
  if successor > token then return {'relieved'} end
  redis.call('HSET', hands, 'beat:' .. hand, text(now))
  if args[9] ~= '' then redis.call('HSET', hands, 'report:' .. hand, args[9]) end
  if args[5] == known[2] and args[8] == '0' then return {'ok', known[2], age} end
  local granted, refused = {}, 0
  for _, label in ipairs(mine) do
    local holder = redis.call('HGET', hands, 'holder:' .. label)
    if not holder or holder == hand or silent(holder) then
      redis.call('HSET', hands, 'holder:' .. label, hand)
      granted[#granted + 1] = label
    else
      refused = refused + 1
    end
  end
  return {'ok', known[2], age, text(refused), granted}
end

-- A hand must be able to leave, and the driver to stop it, also when the store is full.
register_for_full('tailrace_post_VERSION', post)
register_for_full('tailrace_roll_VERSION', roll)
