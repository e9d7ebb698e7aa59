//go:build unix

package lmcache

import "github.com/tinylib/msgp/msgp"

// slot is where an engine finds one object in the pool.
type slot struct {
	offset, length int64
	shape          []int
	dtype          string
}

// appendSlots writes the list of slots as LMCache has it.
func appendSlots(b []byte, slots []slot) []byte {
	b = msgp.AppendString(b, "slots")
	b = msgp.AppendArrayHeader(b, uint32(len(slots)))
	for _, s := range slots {
		b = msgp.AppendMapHeader(b, 4)
		b = msgp.AppendUint64(msgp.AppendString(b, "offset"), uint64(s.offset))
		b = msgp.AppendUint64(msgp.AppendString(b, "length"), uint64(s.length))
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "shape"), uint32(len(s.shape)))
		for _, n := range s.shape {
			b = msgp.AppendUint64(b, uint64(n))
		}
		b = msgp.AppendString(msgp.AppendString(b, "dtype"), s.dtype)
	}
	return b
}

// storeContext tells an engine where to write the chunks with these places in its request.
// Without any there is nothing to write, and nothing to commit.
func storeContext(slots []slot, chunks []int) []byte {
	b := appendSlots(msgp.AppendMapHeader(nil, 2), slots)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "chunk_indices"), uint32(len(chunks)))
	for _, i := range chunks {
		b = msgp.AppendUint64(b, uint64(i))
	}
	return b
}

// retrieveContext tells an engine where to read.
func retrieveContext(slots []slot) []byte { return appendSlots(msgp.AppendMapHeader(nil, 1), slots) }
