-- router/policy/quota.py's `admit`, in one step. Numbers are whole and below 2^53.
-- KEYS: of each subject an account (hash) and its leases (sorted set by end).
-- ARGV: lease, lease_ms, tokens; of each subject: requests and tokens a minute, concurrency,
--       budget_tokens (0 = no limit), period_ms.
-- Returns now_ms, reason (0 = admitted), subject, retry_ms; of each subject: requests, tokens,
--       window, used, running.
local UNIT, CONCURRENCY_RETRY_MS = 60000, 1000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease, lease_ms, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local least = math.max(1, tokens)
local whole = function(number) return string.format('%.0f', number) end

local refill = function(level, at, per_minute)
  if per_minute == 0 then return 0 end
  if not level then return per_minute * UNIT end
  local passed = math.max(0, now - tonumber(at))
  return math.min(per_minute * UNIT, tonumber(level) + per_minute * passed)
end

local subjects = {}
local worst_ms, worst_reason, worst_subject = -1, 0, 0
local obstacle = function(subject, reason, retry_ms)
  if retry_ms > worst_ms then worst_ms, worst_reason, worst_subject = retry_ms, reason, subject end
end

for i = 1, #KEYS / 2 do
  local base = 3 + (i - 1) * 5
  local s = {
    rpm = tonumber(ARGV[base + 1]), tpm = tonumber(ARGV[base + 2]),
    concurrency = tonumber(ARGV[base + 3]), budget = tonumber(ARGV[base + 4]),
    period = tonumber(ARGV[base + 5]), account = KEYS[i * 2 - 1], leases = KEYS[i * 2],
  }
  local held = redis.call('HMGET', s.account, 'requests', 'requests_at', 'tokens', 'tokens_at', 'window', 'used')
  s.requests = refill(held[1], held[2], s.rpm)
  s.tokens = refill(held[3], held[4], s.tpm)
  s.window = math.floor(now / s.period)
  s.used = (held[5] and tonumber(held[5]) == s.window) and tonumber(held[6]) or 0
  redis.call('ZREMRANGEBYSCORE', s.leases, '-inf', whole(now))
  s.running = redis.call('ZCARD', s.leases)
  s.has_place = redis.call('ZSCORE', s.leases, lease)
  if s.rpm > 0 and s.requests < UNIT and not s.has_place then
    obstacle(i, 1, math.ceil((UNIT - s.requests) / s.rpm))
  end
  local needed = math.min(least, s.tpm) * UNIT
  if s.tpm > 0 and s.tokens < needed then
    obstacle(i, 2, math.ceil((needed - s.tokens) / s.tpm))
  end
  if s.concurrency > 0 and s.running >= s.concurrency and not s.has_place then
    obstacle(i, 3, CONCURRENCY_RETRY_MS)
  end
  if s.budget > 0 and s.used + least > s.budget then
    obstacle(i, 4, (s.window + 1) * s.period - now)
  end
  subjects[i] = s
end

local answer = {now, worst_reason, math.max(0, worst_subject - 1), math.max(0, worst_ms)}
for _, s in ipairs(subjects) do
  if worst_reason == 0 then
    if s.rpm > 0 and not s.has_place then s.requests = s.requests - UNIT end
    if s.tpm > 0 then s.tokens = s.tokens - tokens * UNIT end
    s.used = s.used + tokens
    s.running = s.running + (redis.call('ZADD', s.leases, whole(now + lease_ms), lease))
    local fields = {'window', whole(s.window), 'used', whole(s.used)}
    if s.rpm > 0 then
      for _, v in ipairs({'requests', whole(s.requests), 'requests_at', whole(now)}) do fields[#fields + 1] = v end
    end
    if s.tpm > 0 then
      for _, v in ipairs({'tokens', whole(s.tokens), 'tokens_at', whole(now)}) do fields[#fields + 1] = v end
    end
    redis.call('HSET', s.account, unpack(fields))
    -- Kept until nothing would be lost: buckets full again, the period over.
    local owed = s.tpm > 0 and math.ceil((s.tpm * UNIT - s.tokens) / s.tpm) or 0
    local keep = math.max(2 * UNIT, owed, s.budget > 0 and (s.window + 1) * s.period - now or 0)
    redis.call('PEXPIRE', s.account, whole(keep))
    redis.call('PEXPIRE', s.leases, whole(lease_ms))
  end
  for _, v in ipairs({s.requests, s.tokens, s.window, s.used, s.running}) do answer[#answer + 1] = v end
end
return answer
