-- Replaces a value that is as expected. KEYS: the value. ARGV: old, "1" to keep or "0" to remove, new, ttl_ms.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
return 1
