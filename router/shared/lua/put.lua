-- Writes a row of a table if its revision is newer than what is there.
-- KEYS: rows, version, order. ARGV: key, revision, value, most rows, a name for a table that is new.
-- Returns 1 = written, 0 = not newer, -1 = the table is full.
local there = redis.call('HGET', KEYS[1], ARGV[1])
if there then
  if tonumber(string.match(there, '^%d+')) >= tonumber(ARGV[2]) then return 0 end
elseif redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  return -1
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. ARGV[3])
redis.call('HSETNX', KEYS[2], 'name', ARGV[5])
redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[2], 'writes', 1), ARGV[1])
redis.call('HINCRBY', KEYS[2], 'ordered', 1)
return 1
