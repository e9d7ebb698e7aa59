//go:build unix

package kvnode

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// room lends room, or publishes what was written there.
func (p *peer) room(ctx context.Context, what op, c *cursor) ([]byte, error) {
	ref, size, reader, slot := c.Ref(), int64(c.Size()), fmt.Sprintf("%x", c.Take(8)), c.U32()
	id := p.s.store.ID()
	if what == opPublish {
		in, ticket := c.Take(len(id)), 0
		if len(c.B) > 0 {
			ticket = c.Size()
		}
		switch {
		case c.Bad:
			return nil, errBad
		case !bytes.Equal(in, id[:]):
			return nil, kvcache.ErrNotFound // of an arena that is gone
		}
		put, err := p.s.store.Publish(ctx, reader, slot, arena.Ticket(ticket), ref, size)
		if err == nil && p.s.stack != nil {
			p.s.stack.Wrote(put)
		}
		return nil, err
	}
	ticket := c.Size()
	if c.Bad {
		return nil, errBad
	}
	at, err := p.s.store.LendRoom(ctx, reader, slot, arena.Ticket(ticket), ref, size)
	if err != nil {
		return nil, err
	}
	return kvwire.AppendSize(id[:], int(at)), nil
}

// Writer is a Client that can have others write: it reserves room in the arena for
// processes that map it and put their bytes there.
type Writer struct{ *Client }

// OpenWriter makes a writer of the node in dir, which need not be there yet.
func OpenWriter(dir string) (Writer, error) {
	r, err := arena.OpenWriter(dir)
	if err != nil {
		return Writer{}, err
	}
	return Writer{&Client{dir: dir, reader: r}}, nil
}

// Arena asks the node where its arena is, and for the arena's identity: another one has
// nothing of what was in this one.
func (w Writer) Arena(ctx context.Context) (path string, id [16]byte, err error) {
	err = w.ask(ctx, opHello, nil, func(cn *conn, _ cursor) error {
		path, id = cn.hello.Data, cn.hello.ID
		return nil
	})
	return path, id, err
}

// Placed is a block that is lent, and where its frame lies.
type Placed struct {
	*kvcache.Lent
	// At is in bytes from the beginning of the arena with identity Arena.
	At    int64
	Arena [16]byte
}

// Place is Get for those who tell others where the block lies.
func (w Writer) Place(ctx context.Context, ref kvcache.Ref) (Placed, error) {
	l, loan, err := w.get(ctx, ref)
	return Placed{l, loan.At, loan.ID}, err
}

// Room is room for the frame of one block. It stays, also when the node dies and another
// one comes, until Publish has succeeded or Cancel was called, or this process ends. It is
// for one goroutine at a time.
type Room struct {
	w       Writer
	ref     kvcache.Ref
	slot    int
	ticket  arena.Ticket
	b       []byte
	release func()
	// At and Arena say where it is, as for Placed.
	At    int64
	Arena [16]byte
}

// Reserve takes room for the frame of a block, of size bytes. It is nil where the block is
// there already.
func (w Writer) Reserve(ctx context.Context, ref kvcache.Ref, size int64) (*Room, error) {
	slot, ticket, err := w.reader.Ask()
	if err != nil {
		return nil, w.counted(err)
	}
	name, err := hex.DecodeString(w.reader.Name())
	if err != nil {
		return nil, err // of this module's own making
	}
	loan := arena.Loan{Slot: slot, Size: size}
	err = w.ask(ctx, opReserve,
		func(b []byte) []byte {
			b = append(kvwire.AppendSize(kvwire.AppendRef(b, ref), int(size)), name...)
			return kvwire.AppendSize(kvwire.AppendU32(b, slot), int(ticket))
		},
		func(cn *conn, body cursor) error {
			loan.Data = cn.hello.Data
			copy(loan.ID[:], body.Take(len(loan.ID)))
			if loan.At = int64(body.Size()); body.Bad {
				return errShort
			}
			return nil
		})
	if err != nil || loan.At == 0 {
		w.reader.Abandon(slot)
		if err == nil {
			w.count.Duplicates.Add(1)
			return nil, nil
		}
		return nil, fmt.Errorf("reserve room for block %s: %w", ref.Key, err)
	}
	b, release, err := w.reader.Room(loan)
	if err != nil {
		return nil, w.counted(err)
	}
	return &Room{w: w, ref: ref, slot: slot, ticket: ticket, b: b, release: release, At: loan.At, Arena: loan.ID}, nil
}

// Bytes is the room, as long as the frame is to be.
func (r *Room) Bytes() []byte { return r.b }

// Publish makes what is in the room, which must be the sealed frame, a block and gives
// the room up. After an error that Lost does not confirm it may be called again: the room is
// still there.
func (r *Room) Publish(ctx context.Context) error {
	if r.b == nil {
		return kvcache.ErrClosed
	}
	name, err := hex.DecodeString(r.w.reader.Name())
	if err != nil {
		return err // of this module's own making
	}
	size := len(r.b)
	err = r.w.ask(ctx, opPublish, func(b []byte) []byte {
		b = kvwire.AppendU32(append(kvwire.AppendSize(kvwire.AppendRef(b, r.ref), size), name...), r.slot)
		return kvwire.AppendSize(append(b, r.Arena[:]...), int(r.ticket))
	}, nil)
	if err != nil {
		return fmt.Errorf("publish block %s: %w", r.ref.Key, err)
	}
	r.w.count.Puts.Add(1)
	r.w.count.PutBytes.Add(uint64(size))
	r.Cancel()
	return nil
}

// Cancel gives the room up. It may be called again, and after Publish.
func (r *Room) Cancel() {
	if r.b != nil {
		r.b = nil
		r.release()
	}
}

// Lost says of an error of Publish that calling it again is of no use: the node does not
// have the room any more, or refuses what is in it.
func Lost(err error) bool {
	_, refused := errors.AsType[*kvcache.Refusal](err)
	return refused || errors.Is(err, kvcache.ErrNotFound) || errors.Is(err, kvcache.ErrClosed)
}
