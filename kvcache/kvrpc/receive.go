//go:build unix

package kvrpc

import "github.com/kvmesh/kvmesh/kvcache"

// unit is how much of a frame is read before the parts that are whole are verified: few
// enough bytes that they are still near the processor, and as many as the kernel wakes for.
// The first one, with the header, is smaller: the others end where a part does. A frame
// that is hardly longer than a unit is read at once: to be woken twice takes longer.
const (
	unit      = 1 << 20
	unitFirst = 64 << 10
	unitWhole = unit + unit/4
	// leastAhead is how much must have been read with the message's head to be looked at by
	// itself, while the rest is on its way: the header of most frames.
	leastAhead = 4 << 10
)

// receive reads the frame of a block from l into b, which is as long as it, and verifies
// it, header and parts. Before each unit it calls step. A *kvcache.Refusal says that the
// frame is wrong: then all of it was read, and l may be used further.
func receive(l *link, b []byte, want kvcache.Ref, step func() error) (kvcache.Header, error) {
	a := arrival{b: b, want: want}
	for at := 0; at < len(b); {
		if err := step(); err != nil {
			return a.h, err
		}
		end := a.next(at)
		if n := l.r.Buffered(); at == 0 && n >= leastAhead {
			end = min(end, n)
		}
		n, err := l.fill(b[at:end], len(b)-end)
		if at += n; err != nil {
			return a.h, err
		}
		a.came(int64(at))
	}
	if a.wrong == nil && !a.known {
		a.wrong = kvcache.Refuse(kvcache.ReasonTorn, "a frame of %d bytes", len(b))
	}
	return a.h, a.wrong
}

// arrival is a frame that is coming in.
type arrival struct {
	b     []byte
	want  kvcache.Ref
	h     kvcache.Header
	known bool  // h is
	part  int   // the next one to be verified
	wrong error // once it is, nothing is looked at any more
}

// next is where the unit that begins at at ends: with the last part that it has room for,
// or with the one part that has already begun.
func (a *arrival) next(at int) int {
	switch {
	case len(a.b) <= unitWhole:
		return len(a.b)
	case a.wrong != nil:
		return min(at+unit, len(a.b))
	case !a.known:
		return min(at+unitFirst, len(a.b))
	}
	end := at + unit
	for i, p := range a.h.Parts[a.part:] {
		whole := int(p.Offset + p.Size)
		if whole > at+unit && (i > 0 || whole > at+2*unit) {
			break
		}
		end = whole
	}
	return min(end, len(a.b))
}

// came verifies what is whole of the first n bytes.
func (a *arrival) came(n int64) {
	if !a.known && a.wrong == nil {
		a.header(n)
	}
	for a.known && a.wrong == nil && a.part < len(a.h.Parts) {
		p := a.h.Parts[a.part]
		if p.Offset+p.Size > n {
			return
		}
		if kvcache.Sum(a.b[p.Offset:p.Offset+p.Size]) != p.Sum {
			a.wrong = kvcache.Refuse(kvcache.ReasonChecksum, "part %d on its way", a.part)
		}
		a.part++
	}
}

// header reads the header if it is there.
func (a *arrival) header(n int64) {
	need, err := kvcache.HeaderNeed(a.b[:n])
	if err == nil && int64(need) > n {
		if n < int64(len(a.b)) {
			return
		}
		err = kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of a header of %d", n, need)
	}
	if err == nil {
		a.h, err = kvcache.DecodeHeader(a.b[:n])
	}
	if err == nil {
		err = a.h.Check(a.want)
	}
	if err == nil && a.h.Total != int64(len(a.b)) {
		err = kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of a frame of %d", len(a.b), a.h.Total)
	}
	a.known, a.wrong = err == nil, err
}
