-- What upkeep does. Every call carries the token of its lease; a lower one than a shard has seen is refused.

local UPKEEP = 'upkeep'

-- lease(what, owner, length ms, token held or 0): gives the lease to one owner at a time, each time with a higher token.
local function lease(keys, args)
  local key, now = keys[1] .. ':lease:' .. args[1], milliseconds()
  local h = redis.call('HMGET', key, 'owner', 'token', 'until')
  local token, ends = tonumber(h[2] or '0'), tonumber(h[3] or '0')
  local mine = h[1] == args[2] and h[2] == args[4]
  if args[4] ~= '0' and not mine then return {'lost', h[1] or '', text(token)} end
  if not mine then
    if ends > now then return {'held', h[1], text(ends - now)} end
    token = math.max(token + 1, math.floor(now / 1000))
  end
  redis.call('HSET', key, 'owner', args[2], 'token', text(token), 'until', text(now + args[3]))
  return {'ok', text(token)}
end

-- stage(token, view, name, index, length ms, anew, entry id, piece, newest): writes a piece to a key that nobody reads yet
-- and that ends by itself; anew = 1 begins with nothing.
local function stage(keys, args)
  local tag = keys[1]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local staged = tag .. ':staged:' .. args[1] .. ':' .. args[2] .. ':' .. args[4] .. ':' .. args[3]
  if args[6] == '1' then redis.call('UNLINK', staged) end
  redis.call('XADD', staged, args[7], 'r', args[8], 't', args[9])
  redis.call('PEXPIRE', staged, args[5])
  return {'ok'}
end

-- Puts a staged key in a segment's place. The old one is unlinked first: RENAME would free it at once, however large.
local function put_staged(tag, token, view, index, name)
  local segment = segment_key(tag, view, index, name)
  redis.call('UNLINK', segment)
  redis.call('RENAME', tag .. ':staged:' .. token .. ':' .. view .. ':' .. index .. ':' .. name, segment)
  redis.call('PERSIST', segment)
end

-- Whether what is staged for a segment is complete: so many pieces, the last of which ends at this number.
local function is_staged(tag, token, view, index, name, pieces, last)
  local staged = tag .. ':staged:' .. token .. ':' .. view .. ':' .. index .. ':' .. name
  if redis.call('XLEN', staged) ~= tonumber(pieces) then return false end
  local newest = redis.call('XREVRANGE', staged, '+', '-', 'COUNT', 1)[1]
  return newest and string.match(newest[1], '^%d+') == last
end

-- swap(token, view, name, index, epoch, last, events, pieces, bytes, raw bytes, after ms, now ms): makes a segment packed.
-- It must be what was read, its bucket over for long enough by both clocks, and its pieces complete.
local function swap(keys, args)
  local tag, token, view, name, index = keys[1], args[1], args[2], args[3], args[4]
  local owner = fenced(tag, UPKEEP, tonumber(token))
  if owner then return {'stale', text(owner)} end
  local log = log_key(tag, view, name)
  local row, open = find_row(log, index)
  if not row then return {'gone'} end
  if row[10] == PACKED or row[3] ~= tonumber(args[5]) or row[5] ~= tonumber(args[6]) or row[6] ~= tonumber(args[7]) then
    return {'moved'}
  end
  local ends = row[1] + row[2]
  if row[10] ~= SEALED and ends + args[11] > math.min(milliseconds(), tonumber(args[12])) then return {'early'} end
  if not is_staged(tag, token, view, index, name, args[8], args[6]) then return {'unstaged'} end
  put_staged(tag, token, view, index, name)
  row[7], row[9], row[10] = tonumber(args[9]), tonumber(args[10]), PACKED
  redis.call('HSET', log, 's' .. index, cmsgpack.pack(row))
  if open then end_open(log, row) end
  raise_floor(log, ends)
  return {'ok'}
end

-- expire(token, view, name, keep ms, now ms, remember ms, most): drops a log's oldest segments whose buckets, and whose
-- newest events, are older than what is kept, by both clocks. Answers how many, their events and their bytes, and
-- whether the log ended with them.
local function expire(keys, args)
  local tag, view, name = keys[1], args[2], args[3]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local log, now = log_key(tag, view, name), math.min(milliseconds(), tonumber(args[5]))
  local newest_index = tonumber(redis.call('HGET', log, 'i') or '-1')
  local at, segments, events, bytes = tonumber(redis.call('HGET', log, 'a') or '0'), 0, 0, 0
  local ended, left, epoch, carried = nil, false, nil, {}
  while at <= newest_index and segments < tonumber(args[7]) do
    local index = text(at)
    local row, open = find_row(log, index)
    if row then
      if math.max(row[1] + row[2], row[8]) + args[4] > now then left = true break end
      redis.call('UNLINK', segment_key(tag, view, index, name))
      redis.call('HDEL', log, 's' .. index)
      if open then end_open(log, row) end
      raise_floor(log, row[1] + row[2])
      ended = text(row[3]) .. ' ' .. text(row[5])
      if row[3] ~= epoch then epoch, carried = row[3], {} end
      for i = 11, #row - 2, 3 do
        -- What was taken out of a segment goes with it.
        if row[i] ~= epoch then
          for k = i, i + 2 do carried[#carried + 1] = row[k] end
        end
      end
      segments, events, bytes = segments + 1, events + row[6], bytes + row[7]
    end
    at = at + 1
  end
  if segments == 0 then return {'ok', '0', '0', '0', ''} end
  redis.call('HSET', log, 'a', text(at), 'x', ended)
  redis.call('HINCRBY', tag .. ':counts:' .. view, 'expired', events)
  -- What a rebuild stood for is kept by the first segment of it that is left.
  local row, open = find_row(log, text(at))
  if #carried > 0 and row and not open and row[3] == epoch then
    for i = 1, #carried do row[#row + 1] = carried[i] end
    redis.call('HSET', log, 's' .. text(at), cmsgpack.pack(row))
  end
  if left or at <= newest_index then return {'ok', text(segments), text(events), text(bytes), ''} end
  -- Nothing is left: the name goes; its floor and its end stay for a while, and the shard remembers the latest end.
  redis.call('ZREM', tag .. ':names:' .. view, name)
  redis.call('PEXPIRE', log, args[6])
  local gone = redis.call('GET', tag .. ':gone:' .. view)
  local e, n = string.match(gone or '0 0', '^(%d+) (%d+)$')
  local number = tonumber(string.match(ended, ' (%d+)$'))
  e, n = tonumber(e), tonumber(n)
  if epoch > e or (epoch == e and number > n) then redis.call('SET', tag .. ':gone:' .. view, ended) end
  return {'ok', text(segments), text(events), text(bytes), 'ended'}
end

-- reopen(token, view, unix seconds): two new epochs, one for what is rebuilt and one for what is appended from now on, so
-- that no segment which exists now is ever written again. Answers the first and the shard's marks at this moment.
local function reopen(keys, args)
  local tag = keys[1]
  local owner = fenced(tag, UPKEEP, tonumber(args[1]))
  if owner then return {'stale', text(owner)} end
  local known = redis.call('HGET', tag .. ':meta', 'epoch')
  if not known then return {'unready'} end
  local epoch = math.max(tonumber(known) + 1, tonumber(args[3]))
  redis.call('HSET', tag .. ':meta', 'epoch', text(epoch + 1))
  return {'ok', text(epoch), redis.call('HGETALL', tag .. ':marks:' .. args[2])}
end

-- A log that was lost and begun again finds what it had under the keys of its new segments.
local LEFTOVERS = 1000

-- Whether a segment's key holds something from before the segment's first number.
local function has_leftovers(key, first)
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  return oldest and tonumber(string.match(oldest[1], '^%d+')) < first
end

-- Removes leftovers from the open segment and from the keys of segments to come.
local function clear_leftovers(tag, view, name, log, top)
  local h = redis.call('HMGET', log, 'i', 'b', 'f')
  if h[2] then redis.call('XTRIM', segment_key(tag, view, h[1], name), 'MINID', h[3]) end
  for index = top + 1, tonumber(h[1]) + LEFTOVERS do
    local key = segment_key(tag, view, text(index), name)
    if redis.call('EXISTS', key) == 1 and not find_row(log, text(index)) then redis.call('UNLINK', key) end
  end
end

-- Ends a log of which nothing is left: its name goes, and where it ended is remembered for a while.
local function end_log(tag, view, name, log, ended, remember)
  redis.call('HSET', log, 'x', ended)
  redis.call('ZREM', tag .. ':names:' .. view, name)
  redis.call('PEXPIRE', log, remember)
end

-- replace(token, view, name, remember ms, old segments, (index, epoch, last)…, (staged as, pieces, index, row)…): puts staged
-- segments in the place of old ones, which must be what was read and of an epoch that is over. Their indexes must be free
-- or those of old ones, and what is behind them must not begin before they do. An old one whose row cannot be read is given
-- without an epoch. A log of which nothing is left ends as one that expired.
local function replace(keys, args)
  local tag, token, view, name = keys[1], args[1], args[2], args[3]
  local owner = fenced(tag, UPKEEP, tonumber(token))
  if owner then return {'stale', text(owner)} end
  local log = log_key(tag, view, name)
  local epoch = tonumber(redis.call('HGET', tag .. ':meta', 'epoch') or '0')
  local first_new = 6 + 3 * tonumber(args[5])
  local going, open_one, ended = {}, nil, nil
  for i = 6, first_new - 1, 3 do
    if args[i + 1] == '' then
      going[args[i]] = 0
    else
      local row, open = find_row(log, args[i])
      if not row or row[3] ~= tonumber(args[i + 1]) or row[5] ~= tonumber(args[i + 2]) then return {'moved'} end
      if row[3] >= epoch then return {'moved'} end
      if open then open_one = row end
      going[args[i]], ended = row[4], text(row[3]) .. ' ' .. text(row[5])
    end
  end
  local top, start
  for i = first_new, #args, 4 do
    local row = cmsgpack.unpack(args[i + 3])
    if not is_staged(tag, token, view, args[i], name, args[i + 1], text(row[5])) then return {'unstaged'} end
    if not going[args[i + 2]] and find_row(log, args[i + 2]) then return {'moved'} end
    top, start = tonumber(args[i + 2]), row[1]
  end
  if top and not going[text(top + 1)] then
    local behind = find_row(log, text(top + 1))
    if behind and behind[1] < start then return {'moved'} end
  end
  local left = redis.call('HMGET', log, 'i', 'b', 'f')
  local leftovers = not left[1] or (left[2] and has_leftovers(segment_key(tag, view, left[1], name), tonumber(left[3])))
  for i = 6, first_new - 1, 3 do
    local key = segment_key(tag, view, args[i], name)
    leftovers = leftovers or has_leftovers(key, going[args[i]])
    redis.call('UNLINK', key)
    redis.call('HDEL', log, 's' .. args[i])
  end
  if open_one then
    end_open(log, open_one)
    raise_floor(log, open_one[1])
  end
  if not top then
    local goes_on = redis.call('HEXISTS', log, 'b') == 1
    for _, field in ipairs(redis.call('HKEYS', log)) do goes_on = goes_on or string.sub(field, 1, 1) == 's' end
    if goes_on then
      redis.call('ZADD', tag .. ':names:' .. view, 0, name)
    elseif ended then
      end_log(tag, view, name, log, ended, args[4])
    end
    return {'ok'}
  end
  raise_floor(log, start)
  -- The index of the newest is never below 0, so that the next segment is not taken for the first of a new log.
  local lowest, highest = tonumber(redis.call('HGET', log, 'a') or '0'), tonumber(redis.call('HGET', log, 'i') or '0')
  local newest = tonumber(redis.call('HGET', log, 't') or '0')
  for i = first_new, #args, 4 do
    local index, row, segment = tonumber(args[i + 2]), cmsgpack.unpack(args[i + 3]), segment_key(tag, view, args[i + 2], name)
    redis.call('UNLINK', segment)
    redis.call('RENAME', tag .. ':staged:' .. token .. ':' .. view .. ':' .. args[i] .. ':' .. name, segment)
    redis.call('PERSIST', segment)
    redis.call('HSET', log, 's' .. args[i + 2], args[i + 3])
    lowest, highest, newest = math.min(lowest, index), math.max(highest, index), math.max(newest, row[8])
  end
  if lowest <= 0 and tonumber(redis.call('HGET', log, 'a') or '0') > 0 then redis.call('HSET', log, 'd', '1') end
  redis.call('HSET', log, 'a', text(lowest), 'i', text(highest), 't', text(newest))
  local head, seen = string.match(redis.call('HGET', log, 'p') or '', '^(.* )(%d+)$')
  if seen and tonumber(seen) < newest then redis.call('HSET', log, 'p', head .. text(newest)) end
  redis.call('ZADD', tag .. ':names:' .. view, 0, name)
  redis.call('PERSIST', log)
  if leftovers then clear_leftovers(tag, view, name, log, top) end
  return {'ok'}
end

-- thin(token, view, name, remember ms, index, epoch, last, events, pieces, row, neighbour, its row): puts what is left of a
-- segment in its place, with the same numbers. It must be what was read, and of an epoch that is over. With nothing left
-- the segment goes; the neighbour, if there is one, then has in its row which numbers were taken out.
local function thin(keys, args)
  local tag, token, view, name, index = keys[1], args[1], args[2], args[3], args[5]
  local owner = fenced(tag, UPKEEP, tonumber(token))
  if owner then return {'stale', text(owner)} end
  local log = log_key(tag, view, name)
  local row, open = find_row(log, index)
  if not row then return {'gone'} end
  if row[3] ~= tonumber(args[6]) or row[5] ~= tonumber(args[7]) or row[6] ~= tonumber(args[8]) then return {'moved'} end
  if row[3] >= tonumber(redis.call('HGET', tag .. ':meta', 'epoch') or '0') then return {'moved'} end
  local pieces = tonumber(args[9])
  if pieces > 0 then
    if not is_staged(tag, token, view, index, name, args[9], text(cmsgpack.unpack(args[10])[5])) then return {'unstaged'} end
    put_staged(tag, token, view, index, name)
    redis.call('HSET', log, 's' .. index, args[10])
  else
    redis.call('UNLINK', segment_key(tag, view, index, name))
    redis.call('HDEL', log, 's' .. index)
    if args[11] ~= '' then redis.call('HSET', log, 's' .. args[11], args[12]) end
  end
  if open then
    end_open(log, row)
    raise_floor(log, row[1])
  end
  if pieces > 0 then return {'ok'} end
  local lowest
  if redis.call('HEXISTS', log, 'b') == 1 then lowest = tonumber(redis.call('HGET', log, 'i')) end
  for _, field in ipairs(redis.call('HKEYS', log)) do
    local other = tonumber(string.match(field, '^s(-?%d+)$'))
    if other then lowest = math.min(lowest or other, other) end
  end
  local ended = text(row[3]) .. ' ' .. text(row[5])
  if not lowest then
    end_log(tag, view, name, log, ended, args[4])
  elseif tonumber(index) < lowest then
    redis.call('HSET', log, 'x', ended)
  end
  return {'ok'}
end

register_for_full('tailrace_lease_VERSION', lease)
redis.register_function('tailrace_stage_VERSION', stage)
redis.register_function('tailrace_swap_VERSION', swap)
register_for_full('tailrace_expire_VERSION', expire)
redis.register_function('tailrace_reopen_VERSION', reopen)
redis.register_function('tailrace_replace_VERSION', replace)
redis.register_function('tailrace_thin_VERSION', thin)
