package checkpoint

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
	"github.com/kvmesh/kvmesh/worker"
)

const channels = 64

// keysAndValues cuts a state into two matrices of f32, and shape says so.
func keysAndValues(data []byte, _ int) []kvcache.Part {
	half := int64(len(data) / 2)
	return []kvcache.Part{{Plane: kvcache.PlaneKeys, Layers: 1, Size: half}, {Plane: kvcache.PlaneValues, Layers: 1, Size: half}}
}

func shape(_ kvcache.Part, part []byte) (codec.Shape, bool) {
	return codec.Shape{Elem: codec.F32, Rows: len(part) / (4 * channels), Cols: channels}, true
}

// state is the KV of positions from up to to, of numbers between -1 and 1.
func state(dst []byte, from, to int) ([]byte, error) {
	for plane := range 2 {
		for at := from; at < to; at++ {
			r := rand.New(rand.NewPCG(uint64(plane), uint64(at)))
			for range channels {
				dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(2*r.Float32()-1))
			}
		}
	}
	return dst, nil
}

// write lets a session of a keeper keep 40 tokens in blocks of 16, and read gives the
// chain that another session finds.
func write(r *rig, s worker.KVStream, ids []int32) {
	w := r.k.Session(r.e.Model(), s)
	w.Restore(r.Context(), ids, time.Minute)
	w.Step(ids, 40, true, state)
	r.flush()
}

func read(r *rig, s worker.KVStream, ids []int32) worker.KVChain {
	c := r.k.Session(r.e.Model(), s).Restore(r.Context(), ids, time.Minute)
	r.Cleanup(func() {
		if c.Done != nil {
			c.Done(0, 0, nil)
		}
	})
	return c
}

// sized is a store that adds up what it is given.
type sized struct {
	Store
	bytes int64
}

// Put implements kvcache.Store.
func (s *sized) Put(ctx context.Context, f *kvcache.Frame) error {
	s.bytes += f.Total - f.Len
	return s.Store.Put(ctx, f)
}

// TestCodecs: full blocks are stored by the codec, the tail raw; what comes back is what
// was there within the codec's error, and said to be lossy; and no keeper finds the blocks
// of another codec.
func TestCodecs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	rigs, sizes := map[kvcache.Codec]*rig{}, map[kvcache.Codec]*sized{}
	var ids []int32
	for _, c := range []kvcache.Codec{kvcache.CodecRaw, kvcache.CodecInt8, kvcache.CodecInt4} {
		r := newRig(t, dir, "m", Config{Block: 16, Codec: c, Parts: keysAndValues, Shape: shape}, func(s Store) Store {
			sizes[c] = &sized{Store: s}
			return sizes[c]
		})
		rigs[c] = r
		ids = r.prompt(60)[:40]
		if chain := read(r, stream(1), ids); len(chain.Ranges) != 0 {
			t.Errorf("%v: finds the KV of another codec", c)
		}
		write(r, stream(1), ids)
	}
	for c, most := range map[kvcache.Codec]float64{kvcache.CodecRaw: 0, kvcache.CodecInt8: 0.02, kvcache.CodecInt4: 0.6} {
		chain := read(rigs[c], stream(2), ids)
		if n := len(chain.Ranges); n != 3 || chain.Ranges[2].To != 40 || chain.Lossy != (c != kvcache.CodecRaw) {
			t.Fatalf("%v: %d ranges, lossy %v", c, n, chain.Lossy)
		}
		for i, r := range chain.Ranges {
			want, _ := state(nil, r.From, r.To)
			if i == 2 && !bytes.Equal(r.Data, want) {
				t.Errorf("%v: the tail has changed", c)
			}
			first := bytes.Equal(r.Data[:4*channels], want[:4*channels])
			if kept := c == kvcache.CodecInt4 && i == 0; i < 2 && c != kvcache.CodecRaw && first != kept {
				t.Errorf("%v: the keys of token %d are as they were: %v", c, r.From, first)
			}
			if d := furthest(t, r.Data, want); d > most || d == 0 && most > 0 && i < 2 {
				t.Errorf("%v: tokens %d to %d are %v off, at most %v", c, r.From, r.To, d, most)
			}
		}
	}
	if raw, int8, int4 := sizes[kvcache.CodecRaw].bytes, sizes[kvcache.CodecInt8].bytes, sizes[kvcache.CodecInt4].bytes; int8 > raw*2/3 || int4 > int8*3/4 {
		t.Errorf("blocks of %d bytes raw, %d as int8 and %d as int4", raw, int8, int4)
	}
}

// furthest is the largest difference of two matrices.
func furthest(t *testing.T, a, b []byte) (most float64) {
	t.Helper()
	if len(a) != len(b) {
		t.Fatalf("%d bytes, want %d", len(a), len(b))
	}
	for i := 0; i < len(a); i += 4 {
		x, y := math.Float32frombits(binary.LittleEndian.Uint32(a[i:])), math.Float32frombits(binary.LittleEndian.Uint32(b[i:]))
		most = max(most, math.Abs(float64(x-y)))
	}
	return most
}

// TestCodecNeedsShape: what an engine's state is made of is not guessed.
func TestCodecNeedsShape(t *testing.T) {
	r := newRig(t, filepath.Join(t.TempDir(), "kv"), "m", Config{}, nil)
	for name, cfg := range map[string]Config{
		"no shape": {Parts: keysAndValues}, "no parts": {Shape: shape},
	} {
		cfg.Store, cfg.Codec = r.k.cfg.Store, kvcache.CodecInt8
		if k, err := New(cfg); err == nil {
			k.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}
