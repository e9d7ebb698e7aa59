package remote

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
)

// LayerRead says how a part of a frame is read that lies elsewhere.
type LayerRead struct {
	Ref    kvcache.Ref
	Form   kvcache.Form
	Layers kvcache.Layers
	// Header is the frame's, if that is known for sure; else it is read first.
	Header *kvcache.Header
	// Read fills b with the bytes of the frame from a place on, as far as it goes, and says how
	// long the frame is if it is asked for its beginning. It is called by several at once.
	Read func(ctx context.Context, b []byte, from int64) (total int64, err error)
	// Room gives memory for so many bytes; nil = new memory.
	Room func(ctx context.Context, n int64) ([]byte, error)
}

const (
	// headGuess is enough of a frame for the header of a block of the usual size.
	headGuess = 8 << 10
	// gapWorth is how many bytes between two parts are read with them rather than asked around.
	gapWorth = 64 << 10
	// layersAbreast is how many ranges of a frame are read at once.
	layersAbreast = 4
)

// ReadLayers reads header and layers of a frame. Refusals are of the header; those of parts show when
// they are read from the frame.
func ReadLayers(ctx context.Context, r LayerRead) (*kvcache.Frame, error) {
	if r.Header == nil {
		h, err := r.header(ctx)
		if err != nil {
			return nil, err
		}
		r.Header = &h
	}
	if err := r.Header.Check(r.Ref); err != nil {
		return nil, err
	}
	wanted := r.Layers.Parts(r.Header)
	runs, size := runsOf(r.Header, wanted)
	if r.Room == nil {
		r.Room = func(_ context.Context, n int64) ([]byte, error) { return make([]byte, n), nil }
	}
	room, err := r.Room(ctx, size)
	if err != nil {
		return nil, err
	}
	pieces := make([][]byte, len(r.Header.Parts))
	for _, run := range runs {
		run.b, room = room[:run.to-run.from:run.to-run.from], room[run.to-run.from:]
		for _, i := range wanted {
			if p := r.Header.Parts[i]; p.Offset >= run.from && p.Offset+p.Size <= run.to {
				pieces[i] = run.b[p.Offset-run.from:][:p.Size:p.Size]
			}
		}
	}
	if r.Layers.NewestFirst {
		slices.Reverse(runs)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(layersAbreast)
	for _, run := range runs {
		if len(run.b) == 0 {
			continue
		}
		g.Go(func() error {
			_, err := r.Read(ctx, run.b, run.from)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return kvcache.Pieces(*r.Header, pieces)
}

// header reads the header of a frame.
func (r *LayerRead) header(ctx context.Context) (kvcache.Header, error) {
	for need := headGuess; ; {
		b := make([]byte, need)
		total, err := r.Read(ctx, b, 0)
		if err != nil {
			return kvcache.Header{}, err
		}
		b = b[:min(int64(need), total)]
		more, err := kvcache.HeaderNeed(b)
		if err == nil && more > need && int64(more) <= total {
			need = more
			continue
		}
		h, err := r.Form.DecodeHeader(b)
		if err == nil && h.Total != total {
			err = kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of a frame of %d", total, h.Total)
		}
		if err != nil {
			return kvcache.Header{}, fmt.Errorf("read a header: %w", err)
		}
		return h, nil
	}
}

// run is a range of a frame that is read in one go.
type run struct {
	from, to int64
	b        []byte
}

// runsOf joins parts that lie near each other, and says how many bytes all have.
func runsOf(h *kvcache.Header, wanted []int) (runs []*run, size int64) {
	wanted = slices.Sorted(slices.Values(wanted)) // parts lie in the order of the index
	for _, i := range wanted {
		p := h.Parts[i]
		if n := len(runs); n > 0 && p.Offset-runs[n-1].to <= gapWorth {
			size += p.Offset + p.Size - runs[n-1].to
			runs[n-1].to = p.Offset + p.Size
			continue
		}
		runs = append(runs, &run{from: p.Offset, to: p.Offset + p.Size})
		size += p.Size
	}
	return runs, size
}
