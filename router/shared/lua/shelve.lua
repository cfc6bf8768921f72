-- Puts a tenant's value in the place of another; both may be none. The least names make room.
-- KEYS: values by name, the sum of their bytes under ""; the names, in order. ARGV: name, old, new,
-- most values, their bytes, the least name that stays, ms for which all are kept from now on.
local name, old, new = ARGV[1], ARGV[2], ARGV[3]
if (redis.call('HGET', KEYS[1], name) or '') ~= old then return 0 end
local bytes = redis.call('HINCRBY', KEYS[1], '', #new - #old)
redis.call('HSET', KEYS[1], name, new)
redis.call('ZADD', KEYS[2], 0, name)
while true do
  local least = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  local fits = redis.call('ZCARD', KEYS[2]) <= tonumber(ARGV[4]) and bytes <= tonumber(ARGV[5])
  if least == name or (fits and least >= ARGV[6]) then break end
  bytes = redis.call('HINCRBY', KEYS[1], '', -redis.call('HSTRLEN', KEYS[1], least))
  redis.call('HDEL', KEYS[1], least)
  redis.call('ZREM', KEYS[2], least)
end
if new == '' then redis.call('HDEL', KEYS[1], name); redis.call('ZREM', KEYS[2], name) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[7]) end
return 1
