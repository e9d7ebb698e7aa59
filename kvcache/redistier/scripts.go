package redistier

import (
	"encoding/base64"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The scripts. Each touches keys of one node only, and is atomic there. They are sent as
// text with each call: they are short, and no server needs to have seen them before.
const (
	// commit publishes a block. KEYS: manifest, parts. ARGV: manifest, life in ms.
	// 1 = it is published, 0 = another one is, -1 = parts are missing; then the
	// parts are removed.
	scriptCommit = `
local parts = {}
local whole = 1
for i = 2, #KEYS do
	parts[#parts+1] = KEYS[i]
	if redis.call('EXISTS', KEYS[i]) == 0 then whole = -1 end
end
if whole == 1 and not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then whole = 0 end
for _, p in ipairs(parts) do
	if whole == 1 then redis.call('PEXPIRE', p, ARGV[2]) else redis.call('UNLINK', p) end
end
return whole`

	// renew gives a block its life anew. KEYS: manifest, parts. ARGV: life in ms.
	scriptRenew = `
for _, k in ipairs(KEYS) do redis.call('PEXPIRE', k, ARGV[1]) end
return 1`

	// remove removes a block, if it is the one that was looked at. KEYS: manifest,
	// parts. ARGV: the manifest.
	scriptRemove = `
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for _, k in ipairs(KEYS) do redis.call('UNLINK', k) end
return 1`

	// admit counts a block that is about to be written, once, and says how many bytes
	// are in use. KEYS: at, size, used. ARGV: member, bytes.
	scriptAdmit = `
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
if redis.call('ZADD', KEYS[1], 'NX', ms, ARGV[1]) == 1 then
	redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
	return redis.call('INCRBY', KEYS[3], ARGV[2])
end
redis.call('ZADD', KEYS[1], 'XX', ms, ARGV[1])
return tonumber(redis.call('GET', KEYS[3]) or 0)`

	// retire takes blocks out of the count and says how many bytes are in use. KEYS:
	// at, size, used. ARGV: members.
	scriptRetire = `
for _, m in ipairs(ARGV) do
	if redis.call('ZREM', KEYS[1], m) == 1 then
		redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[2], m) or 0)
		redis.call('HDEL', KEYS[2], m)
	end
end
return tonumber(redis.call('GET', KEYS[3]) or 0)`

	// use notes that blocks were used. KEYS: at. ARGV: for each member and how many ms
	// ago; so the clock is the server's alone.
	scriptUse = `
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
for i = 1, #ARGV, 2 do redis.call('ZADD', KEYS[1], 'XX', 'GT', ms - ARGV[i+1], ARGV[i]) end
return 1`

	// outlive puts a block behind its youngest child in the order of eviction. KEYS:
	// at. ARGV: member, its children. 1 = it has one.
	scriptOutlive = `
local last = nil
for i = 2, #ARGV do
	local at = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or 0)
	if at > 0 and (not last or at > last) then last = at end
end
if not last then return 0 end
redis.call('ZADD', KEYS[1], 'XX', 'GT', last + 1, ARGV[1])
return 1`

	// aged lists what was not used for a time. KEYS: at. ARGV: ms, how many at most.
	scriptAged = `
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ms - ARGV[1], 'LIMIT', 0, ARGV[2])`
)

// The members of the count: half of the fingerprint, by which a model is dropped, and the
// key, without padding.
const (
	modelLen  = 22
	memberLen = modelLen + 43
)

// model is what the members of a model begin with.
func model(f kvcache.Fingerprint) string { return base64.RawURLEncoding.EncodeToString(f[:16]) }

// member names a block in the count.
func member(f kvcache.Fingerprint, key kvcache.Key) string {
	return model(f) + base64.RawURLEncoding.EncodeToString(key[:])
}

// keyOf is the key in a member.
func keyOf(member string) (key kvcache.Key, err error) {
	if len(member) != memberLen {
		return key, fmt.Errorf("%q is no block", member)
	}
	b, err := base64.RawURLEncoding.DecodeString(member[modelLen:])
	copy(key[:], b)
	return key, err
}

// sibling names another block of the model of a member.
func sibling(of string, key kvcache.Key) string {
	return of[:modelLen] + base64.RawURLEncoding.EncodeToString(key[:])
}

// after is the least text behind all that begin with a prefix of hexadecimal digits.
func after(prefix string) string { return "(" + prefix + "\xff" }
