//go:build unix

package lmcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// Bounds of what an engine may send.
const (
	mostTokens  = 1 << 24
	mostWorld   = 1 << 12
	mostSalt    = 1 << 10
	mostConfigs = 64 << 10
	mostName    = 4 << 10
)

// allRanks is the rank of a look-up.
const allRanks = -1

// run is a run of chunks of one sequence that an engine asks for.
type run struct {
	model   string
	world   int
	rank    int // allRanks: every one
	request string
	salt    []byte // as doc.go has it
	// ids are the tokens from the sequence's beginning to the end of the last chunk.
	ids []int32
	// first and end bound the chunks.
	first, end int
	readers    int // that will read each rank's chunks, at least 1
}

// runOf reads a key. Chunks are whole: tokens behind the last one do not count.
func runOf(k *lmcachepb.IpcCacheServerKey, chunk int) (run, error) {
	switch {
	case k == nil:
		return run{}, errors.New("no key")
	case k.GetWorldSize() < 1 || k.GetWorldSize() > mostWorld:
		return run{}, fmt.Errorf("world of %d", k.GetWorldSize())
	case len(k.GetModelName()) > mostName || len(k.GetRequestId()) > mostName:
		return run{}, errors.New("a name is too long")
	case len(k.GetTokenIds()) > mostTokens:
		return run{}, fmt.Errorf("%d tokens", len(k.GetTokenIds()))
	case k.GetStart() < 0 || k.GetEnd() < k.GetStart() || k.GetEnd() > int64(len(k.GetTokenIds())):
		return run{}, fmt.Errorf("tokens %d to %d of %d", k.GetStart(), k.GetEnd(), len(k.GetTokenIds()))
	}
	r := run{model: k.GetModelName(), world: int(k.GetWorldSize()), rank: allRanks, request: k.GetRequestId()}
	if k.WorkerId != nil {
		if k.GetWorkerId() < 0 || k.GetWorkerId() >= k.GetWorldSize() {
			return run{}, fmt.Errorf("rank %d of %d", k.GetWorkerId(), k.GetWorldSize())
		}
		r.rank = int(k.GetWorkerId())
	}
	r.readers = int(min(max(k.GetNumKvReaders(), 1), mostWorld))
	r.first, r.end = int(k.GetStart())/chunk, int(k.GetEnd())/chunk
	r.ids = make([]int32, r.end*chunk)
	for i := range r.ids {
		id := k.GetTokenIds()[i]
		if id < 0 || id > math.MaxInt32 {
			return run{}, fmt.Errorf("token id %d", id)
		}
		r.ids[i] = int32(id)
	}
	var err error
	r.salt, err = saltOf(k.GetCacheSalt(), k.GetEncodedRequestConfigs())
	return r, err
}

// saltOf is the tenant's salt.
func saltOf(salt string, configs []byte) ([]byte, error) {
	if len(salt) > mostSalt || len(configs) > mostConfigs {
		return nil, errors.New("salt or configuration is too long")
	}
	var text []byte
	if len(configs) > 0 {
		m, rest, err := msgp.ReadMapStrIntfBytes(configs, nil)
		if err != nil {
			return nil, fmt.Errorf("configuration of the request: %w", err)
		}
		if len(rest) > 0 {
			return nil, errors.New("configuration of the request: something follows it")
		}
		if len(m) > 0 {
			if text, err = canonical(nil, m); err != nil {
				return nil, fmt.Errorf("configuration of the request: %w", err)
			}
		}
	}
	if salt == "" && text == nil {
		return nil, nil
	}
	return kvcache.LMCacheSalt(salt, text), nil
}

// canonical writes a value of a configuration so that no two different ones have the same
// bytes: text and bytes, or a whole number and a fraction, are different, and all lengths
// are given. The order of a map's entries does not count.
func canonical(b []byte, v any) ([]byte, error) {
	length := func(kind byte, n int) { b = binary.LittleEndian.AppendUint32(append(b, kind), uint32(n)) }
	number := func(kind byte, n uint64) { b = binary.LittleEndian.AppendUint64(append(b, kind), n) }
	var err error
	switch v := v.(type) {
	case nil:
		b = append(b, 'n')
	case bool:
		b = strconv.AppendBool(b, v)
	case int64:
		if v >= 0 { // msgpack has two ways to write it
			return canonical(b, uint64(v))
		}
		number('i', uint64(v))
	case uint64:
		number('u', v)
	case float32:
		return canonical(b, float64(v))
	case float64:
		number('d', math.Float64bits(v))
	case string:
		length('s', len(v))
		b = append(b, v...)
	case []byte:
		length('b', len(v))
		b = append(b, v...)
	case []any:
		length('l', len(v))
		for i := 0; i < len(v) && err == nil; i++ {
			b, err = canonical(b, v[i])
		}
	case map[string]any:
		length('m', len(v))
		for _, key := range slices.Sorted(maps.Keys(v)) {
			length('k', len(key))
			if b, err = canonical(append(b, key...), v[key]); err != nil {
				break
			}
		}
	default:
		err = fmt.Errorf("a value of type %T", v)
	}
	return b, err
}

// refs are the names of all chunks of a run from the sequence's beginning on.
func (r *run) refs(space kvcache.Space, chunk int) []kvcache.Ref {
	refs := make([]kvcache.Ref, r.end)
	parent := space.Root
	for i := range refs {
		refs[i] = space.Child(parent, r.ids[i*chunk:(i+1)*chunk])
		parent = refs[i].Key
	}
	return refs
}
