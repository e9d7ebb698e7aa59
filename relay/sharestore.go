package relay

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// streamStore is where gateways share streams: a Redis or Valkey server. One hash per
// stream, which expires by itself:
//
//	llm:stream:<sha256 of the stream's id>
//	  g    which gateway has it: a random word, anew with each that takes it over
//	  n    events with an id so far
//	  h    recordHead, sealed
//	  <k>  []frame from the k-th event on, sealed
//
// Scripts keep a gateway that lost a stream from writing to it.
type streamStore struct{ client *redis.Client }

// keyOf is a stream's key, which does not tell the id.
func keyOf(stream string) string {
	sum := sha256.Sum256([]byte(stream))
	return "llm:stream:" + hex.EncodeToString(sum[:])
}

// put is one write: to what a gateway has of a stream.
type put struct {
	key, gen string
	ttl      time.Duration
	numbered int
	head     []byte // begins the record anew
	field    string // "" writes no frames
	frames   []byte
	drop     []string // fields
	del      bool     // the record goes
}

// What came of a put.
const (
	putTaken = -1 // another gateway has the stream
	putLost  = 0  // the store has forgotten it
	putDone  = 1
)

// The scripts. ARGV: gen, then of putScript ttl in ms, n, head, field, frames, fields to
// delete; of claimScript the new gen.
const (
	putScript = `local g = redis.call('HGET', KEYS[1], 'g')
if g and g ~= ARGV[1] then return -1 end
if ARGV[4] ~= '' then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'g', ARGV[1], 'h', ARGV[4])
elseif not g then return 0 end
redis.call('HSET', KEYS[1], 'n', ARGV[3])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], ARGV[5], ARGV[6]) end
for i = 7, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1`
	delScript = `if redis.call('HGET', KEYS[1], 'g') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1`
	claimScript = `if redis.call('HGET', KEYS[1], 'g') ~= ARGV[1] then return {} end
redis.call('HSET', KEYS[1], 'g', ARGV[2])
return redis.call('HGETALL', KEYS[1])`
)

// write makes the puts in one round trip. Either all results come, or an error; then any
// of them may have been made.
func (s streamStore) write(ctx context.Context, puts []put) ([]int, error) {
	pipe := s.client.Pipeline()
	cmds := make([]*redis.Cmd, len(puts))
	for i, p := range puts {
		if p.del {
			cmds[i] = pipe.Eval(ctx, delScript, []string{p.key}, p.gen)
			continue
		}
		args := []any{p.gen, p.ttl.Milliseconds(), p.numbered, p.head, p.field, p.frames}
		for _, f := range p.drop {
			args = append(args, f)
		}
		cmds[i] = pipe.Eval(ctx, putScript, []string{p.key}, args...)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, fmt.Errorf("write to the store of shared streams: %w", err)
	}
	out := make([]int, len(puts))
	for i, c := range cmds {
		n, err := c.Int()
		if err != nil {
			return nil, fmt.Errorf("write to the store of shared streams: %w", err)
		}
		out[i] = n
	}
	return out, nil
}

// peek reads who has a stream, how far it is and its head; ok is false when there is none.
func (s streamStore) peek(ctx context.Context, key string) (gen string, numbered int, head []byte, ok bool, err error) {
	got, err := s.client.HMGet(ctx, key, "g", "n", "h").Result()
	if err != nil {
		return "", 0, nil, false, fmt.Errorf("look a shared stream up: %w", err)
	}
	var text [3]string
	for i, v := range got {
		if text[i], ok = v.(string); !ok {
			return "", 0, nil, false, nil
		}
	}
	n, err := strconv.Atoi(text[1])
	return text[0], n, []byte(text[2]), err == nil, nil // what is no number is no stream
}

// field is one of the fields that hold frames.
type field struct {
	from   int
	sealed []byte
}

// claim takes a stream from gen for to and reads it, the fields in order; none when it
// is gen's no more.
func (s streamStore) claim(ctx context.Context, key, gen, to string) ([]field, error) {
	got, err := s.client.Eval(ctx, claimScript, []string{key}, gen, to).StringSlice()
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("take a shared stream over: %w", err)
	}
	var out []field
	for i := 0; i+1 < len(got); i += 2 {
		if n, err := strconv.Atoi(got[i]); err == nil {
			out = append(out, field{n, []byte(got[i+1])})
		}
	}
	slices.SortFunc(out, func(a, b field) int { return a.from - b.from })
	return out, nil
}

// ping reports whether the store answers.
func (s streamStore) ping(ctx context.Context) bool { return s.client.Ping(ctx).Err() == nil }
