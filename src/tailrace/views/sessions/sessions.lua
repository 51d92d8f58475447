-- Telemetry sessions. All calls but put_session have two keys: a stream, and the tag of our keys beside it in the same slot.

local NOTHING = '-1'
-- The first bytes of a session's stored value are its version, which is never used again.
local PREFIX_BYTES = 8
-- Field of the hash of sessions: the highest number assigned in the stream. No session can have that name.
local HIGHEST = '\0'
-- Fields of the hash of trim notes, beside the numbers of sessions: the newest trimmed entry of all; the end of the stream's
-- beginning that we have trimmed, as the end of a range of the ledger; and the id from which the ledger is complete, if it was cut.
local NEWEST, OURS, WHOLE = 'newest', 'ours', 'whole'

-- Return the last id that the stream generated, even if that entry is gone.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

local function version_of(tag, identity)
  return string.sub(redis.call('HGET', tag .. ':sessions', identity) or '', 1, PREFIX_BYTES)
end

-- Return the unfinished openings of an identity: {number, position, writer, offset, ms}.
local function claims_of(tag, identity)
  local known = redis.call('HGET', tag .. ':claims', identity)
  return known and cmsgpack.unpack(known) or {}
end

local function keep_claims(tag, identity, claims)
  if #claims > 0 then
    redis.call('HSET', tag .. ':claims', identity, cmsgpack.pack(claims))
  else
    redis.call('HDEL', tag .. ':claims', identity)
  end
end

-- Return the highest number that other writers have claimed.
local function highest_other(claims, writer)
  local highest = 0
  for _, each in ipairs(claims) do
    if each[3] ~= writer then highest = math.max(highest, each[1]) end
  end
  return highest
end

-- claim(writer, offset, identity, version seen, number, floor): return the number and the position of a session that a record
-- opens. A repeated opening gets the same, unless the name had a life in another stream meanwhile, whose number is the floor.
-- old: the record is in the stream, or the session has changed since it was read; low: a number above the answer is needed.
-- Numbers ascend with the offsets of a writer, and of several writers only the last one may go on; no number is assigned twice in
-- a stream, even if the counter has lost its last writes.
local function claim(keys, args)
  local stream, tag = keys[1], keys[2]
  local writer, offset, identity, number = args[1], tonumber(args[2]), args[3], tonumber(args[5])
  if tonumber(redis.call('HGET', tag .. ':marks', writer) or NOTHING) >= offset then return {'old'} end
  if version_of(tag, identity) ~= args[4] then return {'old'} end
  local claims = claims_of(tag, identity)
  local floor = math.max(highest_other(claims, writer), tonumber(args[6]))
  local highest, kept = math.max(floor, tonumber(redis.call('HGET', tag .. ':sessions', HIGHEST) or 0)), {}
  for _, each in ipairs(claims) do
    highest = math.max(highest, each[1])
    if each[3] == writer and each[4] == offset and each[1] > floor then return {'ok', text(each[1]), each[2]} end
    if each[3] ~= writer or each[4] < offset then kept[#kept + 1] = each end
  end
  if number <= highest then return {'low', text(highest)} end
  local position = last_id(stream)
  kept[#kept + 1] = {number, position, writer, offset, milliseconds()}
  keep_claims(tag, identity, kept)
  redis.call('HSET', tag .. ':sessions', HIGHEST, text(number))
  return {'ok', text(number), position}
end

-- put_session(stream, number, mark, amendment, expire ms, states that are over, field, value…), on the key of a session's hash:
-- write it unless the stored one is of a higher order. taken: it belongs to another stream, and is not over there, or has a later
-- life; or the key is no hash.
local function put_session(keys, args)
  local known = redis.pcall('HMGET', keys[1], 'streamName', 'streamSessionId', 'state', 'order')
  if known.err then return {'taken', ''} end
  local number = tonumber(args[2])
  local theirs = tonumber(known[2] or nil)
  if theirs then
    local is_over = known[3] and string.find(args[6], ' ' .. known[3] .. ' ', 1, true)
    if known[1] ~= args[1] and (theirs > number or not is_over) then return {'taken', known[1]} end
    local n, mark, amendment = string.match(known[4] or '', '^(%d+) (%-?%d+) (%d+)$')
    local stored = {tonumber(n) or theirs, tonumber(mark) or -1, tonumber(amendment) or 0}
    for i = 1, 3 do
      local mine = tonumber(args[i + 1])
      if stored[i] > mine then return {'old'} end
      if stored[i] < mine then break end
    end
    if theirs ~= number then redis.call('DEL', keys[1]) end
  end
  redis.call('HSET', keys[1], unpack(args, 7))
  redis.call('PEXPIRE', keys[1], args[5])
  return {'ok'}
end

-- append(writer, mark seen, mark, n, (identity, version seen, value, number if it is opened)…, (number, data)…): write entries,
-- values of sessions, and the writer's mark; or nothing, if the mark or a version is not the one seen, or if another writer has
-- claimed a session that is opened here. A writer without a name has no mark.
local function append_entries(keys, args)
  local stream, tag, writer, marks = keys[1], keys[2], args[1], keys[2] .. ':marks'
  if writer ~= '' then
    local mark = redis.call('HGET', marks, writer) or NOTHING
    if tonumber(mark) ~= tonumber(args[2]) then return {'moved', mark} end
  end
  local last, claims = 4 + 4 * tonumber(args[4]), {}
  for i = 5, last, 4 do
    local identity, number = args[i], tonumber(args[i + 3])
    if version_of(tag, identity) ~= args[i + 1] then return {'conflict', identity} end
    if number then
      claims[identity] = claims_of(tag, identity)
      if highest_other(claims[identity], writer) > number then return {'conflict', identity} end
    end
  end
  local first, id
  for i = last + 1, #args, 2 do
    id = redis.call('XADD', stream, '*', 'id', args[i], 'data', args[i + 1])
    first = first or id
  end
  for i = 5, last, 4 do redis.call('HSET', tag .. ':sessions', args[i], args[i + 2]) end
  if writer == '' then return {'ok'} end
  redis.call('HSET', marks, writer, args[3])
  for identity, known in pairs(claims) do
    local kept = {}
    for _, each in ipairs(known) do
      if each[3] ~= writer or each[4] > tonumber(args[3]) then kept[#kept + 1] = each end
    end
    keep_claims(tag, identity, kept)
  end
  if id then
    local ledger = tag .. ':ledger'
    -- If all ids of a write have the same millisecond, the distance from the first to the last is enough, and shorter.
    local ms, last_seq = string.match(id, '^(%d+)-(%d+)$')
    local first_ms, seq = string.match(first, '^(%d+)-(%d+)$')
    if first_ms == ms then first = text(tonumber(last_seq) - tonumber(seq)) end
    local noted = redis.pcall('XADD', ledger, id, 'w', writer, 'f', args[2], 'm', args[3], 'a', first)
    if type(noted) == 'table' and noted.err then
      -- The stream was removed, and its ids began anew: the ledger is useless.
      redis.call('DEL', ledger)
      redis.call('HDEL', tag .. ':trimmed', NEWEST, OURS, WHOLE)
      redis.call('XADD', ledger, id, 'w', writer, 'f', args[2], 'm', args[3], 'a', first)
    end
  end
  return {'ok'}
end

-- weigh(after, entries, bytes): return id, number and size of the next entries, within limits of their count and their bytes.
local function weigh(keys, args)
  local found, after, entries, left = {}, args[1], tonumber(args[2]), tonumber(args[3])
  -- The page size follows from the largest entry so far: each may have a megabyte.
  local page, largest = 1, 1
  while entries > 0 and left > 0 do
    local some = redis.call('XRANGE', keys[1], '(' .. after, '+', 'COUNT', page)
    if #some == 0 then break end
    for _, entry in ipairs(some) do
      local number, size = '', 0
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'id' then number = entry[2][i + 1] end
        size = size + #entry[2][i + 1]
      end
      local n = #found
      found[n + 1], found[n + 2], found[n + 3] = entry[1], number, size
      after, left, largest = entry[1], left - size, math.max(largest, size)
    end
    entries = entries - #some
    page = math.max(1, math.min(entries, 64, math.floor(left / largest)))
  end
  return found
end

local function is_before(a, b)
  local a_ms, a_n = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_n = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) end
  return tonumber(a_n) < tonumber(b_n)
end

-- shed(number, ids…): delete entries of a session from the stream, the oldest first, and note that for its readers, and the end of
-- the beginning that we have trimmed. Return the number of entries deleted.
local function shed(keys, args)
  local trimmed = keys[2] .. ':trimmed'
  local gone = redis.call('XDEL', keys[1], unpack(args, 2))
  for _, field in ipairs({args[1], NEWEST}) do
    local known = redis.call('HGET', trimmed, field)
    if not known or is_before(known, args[#args]) then redis.call('HSET', trimmed, field, args[#args]) end
  end
  local first = redis.call('XRANGE', keys[1], '-', '+', 'COUNT', 1)[1]
  redis.call('HSET', trimmed, OURS, first and '(' .. first[1] or last_id(keys[1]))
  return gone
end

-- cut_ledger(ms): delete writes before a time from the ledger, unless the stream has their entries. Return the number deleted.
local function cut_ledger(keys, args)
  local first = redis.call('XRANGE', keys[1], '-', '+', 'COUNT', 1)[1]
  local begin = args[1] .. '-0'
  if first and is_before(first[1], begin) then begin = first[1] end
  local gone = redis.call('XTRIM', keys[2] .. ':ledger', 'MINID', begin)
  if gone > 0 then redis.call('HSET', keys[2] .. ':trimmed', WHOLE, begin) end
  return gone
end

-- forget_session(identity, version seen, number, ms): delete the stored value of a session, if it is the one seen, and unfinished
-- openings from before a time.
local function forget_session(keys, args)
  local tag, identity = keys[2], args[1]
  if version_of(tag, identity) ~= args[2] then return 0 end
  redis.call('HDEL', tag .. ':sessions', identity)
  if args[3] ~= '' then redis.call('HDEL', tag .. ':trimmed', args[3]) end
  local kept = {}
  for _, each in ipairs(claims_of(tag, identity)) do
    if each[5] >= tonumber(args[4]) then kept[#kept + 1] = each end
  end
  keep_claims(tag, identity, kept)
  return 1
end

-- drop_stream(ms): delete a stream without sessions and without entries since a time. Marks and notes of writers (names that begin
-- with a zero byte) stay: they guard against records that may come again after years.
local function drop_stream(keys, args)
  local stream, tag = keys[1], keys[2]
  if redis.call('EXISTS', stream) == 0 or redis.call('EXISTS', tag .. ':claims') == 1 then return 0 end
  if tonumber(string.match(last_id(stream), '^%d+')) >= tonumber(args[1]) then return 0 end
  for _, identity in ipairs(redis.call('HKEYS', tag .. ':sessions')) do
    if string.byte(identity) ~= 0 then return 0 end
  end
  redis.call('UNLINK', stream, tag .. ':ledger', tag .. ':trimmed')
  return 1
end

redis.register_function('tailrace_claim_VERSION', claim)
redis.register_function('tailrace_put_session_VERSION', put_session)
redis.register_function('tailrace_append_VERSION', append_entries)
redis.register_function{function_name = 'tailrace_weigh_VERSION', callback = weigh, flags = {'no-writes'}}
register_for_full('tailrace_shed_VERSION', shed)
register_for_full('tailrace_cut_ledger_VERSION', cut_ledger)
register_for_full('tailrace_forget_session_VERSION', forget_session)
register_for_full('tailrace_drop_stream_VERSION', drop_stream)
