-- Open folds: the states of groups, their due times, and the emission of closed folds.
--
--   fold:<rule>    hash: group -> version of eight bytes, never used again, and state
--   due:<rule>     sorted set: groups by due time
--   closed:<rule>  sorted set: for a while, groups by the last event of a fold that closed by quiet
--
-- A rule is given as name:definition, the end of its keys; counters are kept under its name.
local function name_of(rule) return string.match(rule, '^[^:]*') end

-- Returns for each group whether it has the expected version; '' means that the group must not exist.
local function have_versions(tag, rule, groups, seen)
  local same = {}
  for first = 1, #groups, MOST do
    local last = math.min(first + MOST - 1, #groups)
    local stored = redis.call('HMGET', tag .. ':fold:' .. rule, unpack(groups, first, last))
    for i = first, last do
      local value = stored[i - first + 1]
      same[i] = (value and string.sub(value, 1, 8) or '') == seen[i]
    end
  end
  return same
end

-- Writes groups; removes those whose value is empty.
local function write_groups(tag, rule, groups, values, dues)
  local set, due, gone = {}, {}, {}
  for i = 1, #groups do
    if values[i] == '' then
      gone[#gone + 1] = groups[i]
    else
      set[#set + 1], set[#set + 2] = groups[i], values[i]
      due[#due + 1], due[#due + 2] = dues[i], groups[i]
    end
  end
  call_many('HSET', tag .. ':fold:' .. rule, set)
  call_many('ZADD', tag .. ':due:' .. rule, due)
  call_many('HDEL', tag .. ':fold:' .. rule, gone)
  call_many('ZREM', tag .. ':due:' .. rule, gone)
end

-- The counters and quiet times of the folds that a call emits; written at its end.
local function new_account() return {counts = {}, quiet = {}, keep = {}} end

local function count(account, field, n) account.counts[field] = (account.counts[field] or 0) + n end

local function emit(tag, account, epoch, number, rule, group, id, topic, key, value, reason, last, keep)
  count(account, 'emitted:' .. name_of(rule), 1)
  count(account, 'reason:' .. name_of(rule) .. ':' .. reason, 1)
  if reason == 'quiet' then
    local quiet = account.quiet[rule] or {}
    quiet[#quiet + 1], quiet[#quiet + 2] = last, group
    account.quiet[rule], account.keep[rule] = quiet, keep
  end
  return send(tag, epoch, number, id, topic, key, value, '')
end

local function close_account(tag, account)
  for field, n in pairs(account.counts) do redis.call('HINCRBY', tag .. ':counts:folds', field, text(n)) end
  for rule, quiet in pairs(account.quiet) do
    call_many('ZADD', tag .. ':closed:' .. rule, quiet)
    redis.call('PEXPIRE', tag .. ':closed:' .. rule, account.keep[rule])
  end
end

-- Reads a G item at i: rule, inputs, groups, then of each group name, expected version, value, due, near. Returns the item and
-- the index of the next one.
local function read_groups(args, i)
  local found = {rule = args[i + 1], inputs = tonumber(args[i + 2]), groups = {}, seen = {}, values = {}, dues = {}, near = {}}
  local n, at = tonumber(args[i + 3]), i + 4
  for k = 1, n do
    found.groups[k], found.seen[k], found.values[k], found.dues[k], found.near[k] = unpack(args, at, at + 4)
    at = at + 5
  end
  return found, at
end

-- Counts the new groups of a G item, and those of them whose last fold was emitted prematurely.
local function count_groups(tag, account, item)
  local name = name_of(item.rule)
  count(account, 'input:' .. name, item.inputs)
  local closed = tag .. ':closed:' .. item.rule
  local known = redis.call('EXISTS', closed) == 1
  for k = 1, #item.groups do
    if item.seen[k] == '' then
      count(account, 'new:' .. name, 1)
      local quieted = known and redis.call('ZSCORE', closed, item.groups[k])
      if quieted and tonumber(quieted) > tonumber(item.near[k]) then count(account, 'premature:' .. name, 1) end
    end
  end
end

-- settle(rule, driver epoch, forget ms, (group, seen, value, due, folds, (id, topic, key, value, reason, last, keep)…)…)
-- Writes groups and emits their folds, each group only if it still has the version seen; answers 1 for those and 0 for the
-- others. Forgets the quiet times before forget. A driver with a stale epoch changes nothing; other callers pass epoch 0.
local function settle(keys, args)
  local tag, rule = keys[1], args[1]
  local epoch = redis.call('HGET', tag .. ':meta', 'epoch')
  if not epoch then return {} end
  local driver = tonumber(args[2])
  if driver > 0 and fenced(tag, 'folds', driver) then return {'stale'} end
  redis.call('ZREMRANGEBYSCORE', tag .. ':closed:' .. rule, '-inf', args[3])
  local groups, seen, places = {}, {}, {}
  local i = 4
  while i <= #args do
    groups[#groups + 1], seen[#seen + 1], places[#places + 1] = args[i], args[i + 1], i
    i = i + 5 + 7 * tonumber(args[i + 4])
  end
  local same = have_versions(tag, rule, groups, seen)
  local changed, values, dues, done = {}, {}, {}, {}
  local number = tonumber(redis.call('GET', tag .. ':number') or '0')
  local began, account = number, new_account()
  for k, at in ipairs(places) do
    done[k] = same[k] and 1 or 0
    if same[k] then
      changed[#changed + 1], values[#values + 1], dues[#dues + 1] = groups[k], args[at + 2], args[at + 3]
      for f = at + 5, at + 5 + 7 * (tonumber(args[at + 4]) - 1), 7 do
        number = emit(tag, account, epoch, number, rule, groups[k], unpack(args, f, f + 6))
      end
    end
  end
  write_groups(tag, rule, changed, values, dues)
  close_account(tag, account)
  if number > began then redis.call('SET', tag .. ':number', text(number)) end
  return done
end

local function account_of(call)
  call.account = call.account or new_account()
  return call.account
end

-- G rule inputs n (group seen value due near)…       write what groups hold if their versions are those seen ('' for none);
--                                  no value removes one; a group that fell quiet after near was emitted too early
GUARDED.G = {
  read = read_groups,
  holds = function(call, item)
    for _, same in ipairs(have_versions(call.tag, item.rule, item.groups, item.seen)) do
      if not same then return false end
    end
    return true
  end,
  write = function(call, item)
    count_groups(call.tag, account_of(call), item)
    write_groups(call.tag, item.rule, item.groups, item.values, item.dues)
  end,
}

-- F rule group id topic key value reason last keep   emit a closed fold; that it fell quiet is remembered for keep ms
function ITEMS.F(call, args, i)
  call.number = emit(call.tag, account_of(call), call.epoch, call.number, unpack(args, i + 1, i + 9))
  return i + 10
end

function ENDINGS.folds(call)
  if call.account then close_account(call.tag, call.account) end
end

redis.register_function('tailrace_settle_VERSION', settle)
