-- router/policy/quota.py's `settle`. KEYS as in admit.lua.
-- Returns now_ms and for how many subjects it counted.
-- ARGV: lease, tokens reserved, tokens used; of each subject: tokens a minute, window as admitted.
local UNIT = 60000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease, reserved, used = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local whole = function(number) return string.format('%.0f', number) end
local settled = 0

for i = 1, #KEYS / 2 do
  local account, leases = KEYS[i * 2 - 1], KEYS[i * 2]
  local tpm, window = tonumber(ARGV[2 + i * 2]), tonumber(ARGV[3 + i * 2])
  local ending = redis.call('ZSCORE', leases, lease)
  redis.call('ZREM', leases, lease)
  if ending and redis.call('EXISTS', account) == 1 then
    settled = settled + 1
    local held = redis.call('HMGET', account, 'tokens', 'tokens_at', 'window', 'used')
    if tpm > 0 and held[1] then
      local passed = math.max(0, now - tonumber(held[2]))
      local level = math.min(tpm * UNIT, tonumber(held[1]) + tpm * passed)
      level = math.min(tpm * UNIT, level + (reserved - used) * UNIT)
      redis.call('HSET', account, 'tokens', whole(level), 'tokens_at', whole(now))
    end
    if held[3] and tonumber(held[3]) == window then
      redis.call('HSET', account, 'used', whole(math.max(0, tonumber(held[4]) + used - reserved)))
    end
  end
end
return {now, settled}
