-- Adds to the counters of a book. KEYS: the book. ARGV: ttl_ms, most counters; counter, group, amount, …
-- A counter that finds the book full is counted as its group.
local fields = redis.call('HLEN', KEYS[1])
for i = 3, #ARGV, 3 do
  local counter = ARGV[i]
  if redis.call('HEXISTS', KEYS[1], counter) == 0 then
    if fields >= tonumber(ARGV[2]) then counter = ARGV[i + 1] else fields = fields + 1 end
  end
  redis.call('HINCRBY', KEYS[1], counter, ARGV[i + 2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return fields
