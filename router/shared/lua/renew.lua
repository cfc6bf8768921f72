-- KEYS: the leases of one subject. ARGV: lease_ms, leases. Those that have ended stay ended.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ending = string.format('%.0f', now + tonumber(ARGV[1]))
local renewed = 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], ending, ARGV[i])
    renewed = renewed + 1
  end
end
if renewed > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return renewed
