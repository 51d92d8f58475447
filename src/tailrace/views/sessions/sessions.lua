-- Telemetry sessions. All calls but put_session declare a stream and the tag of what is ours beside it; both are in one slot.

local NOTHING = '-1'
-- So many bytes before the state of a session are its version, which is never used again.
local STAMP = 8
-- Where the sessions of a stream are, the highest number that was given out there; no session can have that name.
local GIVEN = '\0'
-- Where it is noted what was trimmed of sessions, beside their numbers: the newest entry of all; up to where the beginning of the
-- stream is our own doing, as the end of a range of the ledger; and from which id on the ledger has every write, if it has lost some.
local NEWEST, OURS, WHOLE = 'newest', 'ours', 'whole'

-- Answers the id that the stream's last entry had, also when it is gone.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

local function version_of(tag, identity)
  return string.sub(redis.call('HGET', tag .. ':sessions', identity) or '', 1, STAMP)
end

-- Openings of an identity that are under way, in a hash of claims: {number, position, writer, offset, ms}.
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

-- Answers the highest number that other writers have claimed.
local function highest_other(claims, writer)
  local highest = 0
  for _, each in ipairs(claims) do
    if each[3] ~= writer then highest = math.max(highest, each[1]) end
  end
  return highest
end

-- claim(writer, offset, identity, version seen, number, floor): the number and the position of a session that a record opens.
-- Whoever repeats it gets the same, unless the name had a life in another stream meanwhile, whose number is the floor. old: the
-- record is in the stream, or the session has changed since it was read; low: a number above the one answered is needed. Numbers
-- rise with the offsets of a writer, and of several writers only the one that was last may go on; no number is given twice in a
-- stream, also when the counter has lost its last writes.
local function claim(keys, args)
  local stream, tag = keys[1], keys[2]
  local writer, offset, identity, number = args[1], tonumber(args[2]), args[3], tonumber(args[5])
  if tonumber(redis.call('HGET', tag .. ':marks', writer) or NOTHING) >= offset then return {'old'} end
  if version_of(tag, identity) ~= args[4] then return {'old'} end
  local claims = claims_of(tag, identity)
  local floor = math.max(highest_other(claims, writer), tonumber(args[6]))
  local highest, kept = math.max(floor, tonumber(redis.call('HGET', tag .. ':sessions', GIVEN) or 0)), {}
  for _, each in ipairs(claims) do
    highest = math.max(highest, each[1])
    if each[3] == writer and each[4] == offset and each[1] > floor then return {'ok', text(each[1]), each[2]} end
    if each[3] ~= writer or each[4] < offset then kept[#kept + 1] = each end
  end
  if number <= highest then return {'low', text(highest)} end
  local position = last_id(stream)
  kept[#kept + 1] = {number, position, writer, offset, milliseconds()}
  keep_claims(tag, identity, kept)
  redis.call('HSET', tag .. ':sessions', GIVEN, text(number))
  return {'ok', text(number), position}
end

-- put_session(stream, number, mark, amendment, expire ms, states that are over, field, value…), on the key of a session's hash:
-- writes it unless what is there is of a higher order. taken: it is another stream's, and not over there, or of a later life; or it
-- is no hash.
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

-- append(writer, mark seen, mark, n, (identity, version seen, value, number if it is opened)…, (number, data)…): entries, what
-- sessions have become, and the mark of whoever writes; or nothing, if the mark is not the one seen, or a version, or if a session
-- that is opened was claimed by another writer since. A writer without a name has no mark.
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
    -- All ids of a write are of one millisecond: then it is enough to say how far the first is from the last, which is shorter.
    local ms, last_seq = string.match(id, '^(%d+)-(%d+)$')
    local first_ms, seq = string.match(first, '^(%d+)-(%d+)$')
    if first_ms == ms then first = text(tonumber(last_seq) - tonumber(seq)) end
    local noted = redis.pcall('XADD', ledger, id, 'w', writer, 'f', args[2], 'm', args[3], 'a', first)
    if type(noted) == 'table' and noted.err then
      -- Somebody removed the stream, and its ids began anew: what the ledger said is of no use any more.
      redis.call('DEL', ledger)
      redis.call('HDEL', tag .. ':trimmed', NEWEST, OURS, WHOLE)
      redis.call('XADD', ledger, id, 'w', writer, 'f', args[2], 'm', args[3], 'a', first)
    end
  end
  return {'ok'}
end

-- weigh(after, entries, bytes): id, number and size of the next entries, up to so many of them, or little more than so many bytes.
local function weigh(keys, args)
  local found, after, entries, left = {}, args[1], tonumber(args[2]), tonumber(args[3])
  -- How many are copied at once goes by the largest so far: each may have a megabyte.
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

-- shed(number, ids…): takes entries of a session out of the stream, the oldest first, and says so for its readers; and up to where
-- the stream's beginning is gone by our own doing. Answers how many there were.
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

-- cut_ledger(ms): takes writes from before then out of the ledger, unless they are in the stream, or later than what is. Answers how
-- many there were.
local function cut_ledger(keys, args)
  local first = redis.call('XRANGE', keys[1], '-', '+', 'COUNT', 1)[1]
  local begin = args[1] .. '-0'
  if first and is_before(first[1], begin) then begin = first[1] end
  local gone = redis.call('XTRIM', keys[2] .. ':ledger', 'MINID', begin)
  if gone > 0 then redis.call('HSET', keys[2] .. ':trimmed', WHOLE, begin) end
  return gone
end

-- forget_session(identity, version seen, number, ms): what the stream knows of a session, if it is what was seen; and claims from
-- before then that came to nothing.
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

-- drop_stream(ms): removes a stream that has no session and got nothing since then. Marks stay, and what writers noted down, which
-- is under names that begin with a zero byte: they guard against records that may come again after years.
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
