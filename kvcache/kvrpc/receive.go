//go:build unix

package kvrpc

import (
	"io"

	"github.com/kvmesh/kvmesh/kvcache"
)

// unit is how much of a frame is read before the parts that are whole are verified: few
// enough bytes that they are still near the processor.
const unit = 256 << 10

// receive reads the frame of a block from r into b, which is as long as it, and verifies
// it, header and parts. Before each unit it calls step. A *kvcache.Refusal says that the
// frame is wrong: then all of it was read, and r may be used further.
func receive(r io.Reader, b []byte, want kvcache.Ref, step func() error) (kvcache.Header, error) {
	a := arrival{b: b, want: want}
	for at := 0; at < len(b); {
		if err := step(); err != nil {
			return a.h, err
		}
		n, err := io.ReadFull(r, b[at:min(at+unit, len(b))])
		if at += n; err != nil {
			return a.h, err
		}
		a.came(int64(at))
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
