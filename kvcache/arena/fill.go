//go:build unix

package arena

import "context"

// fillStep is how much of a mapping is filled at once, in bytes: a fraction of a millisecond,
// for which others of this process may wait that map or unmap something.
const fillStep = 4 << 20

// FillLater has this reader's mappings filled in the background as soon as they are made:
// all of the arena is entered into this process's page tables. The kernel has to be asked for
// a page that is read for the first time, which for a block takes longer than to verify it;
// in a filled mapping it has not. It takes about 0.2 s of a processor for a GiB, once, and
// page tables of a 512th of the arena. Filled is only what surely is in memory already: a
// file in shared memory all of which was taken, on Linux.
func (r *Reader) FillLater() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fills = true
}

// Fill is FillLater that maps the arena that l names now, and returns when it is filled, or
// with the error of ctx when that ends.
func (r *Reader) Fill(ctx context.Context, l Loan) error {
	r.FillLater()
	v, err := r.use(l)
	if err != nil {
		return err
	}
	defer r.leave(v)
	select {
	case <-r.filling(v):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// filling begins to fill a mapping, if that has not begun, and returns what is closed at the
// end.
func (r *Reader) filling(v *view) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fillingLocked(v)
}

func (r *Reader) fillingLocked(v *view) <-chan struct{} {
	if v.filled == nil {
		v.filled = make(chan struct{})
		v.uses++ // so that it stays
		go func() {
			defer r.leave(v)
			defer close(v.filled)
			r.fill(v)
		}()
	}
	return v.filled
}

// fill does it, for as long as somebody may read more of the mapping.
func (r *Reader) fill(v *view) {
	for at := 0; v.inMemory && at < len(v.b); at += fillStep {
		r.mu.Lock()
		past := r.closed || v.old
		r.mu.Unlock()
		if past {
			return
		}
		enterPages(v.b[at:min(at+fillStep, len(v.b))])
	}
}
