//go:build unix

package kvnode

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/accept"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// SocketName is the socket's name in the node's directory.
const SocketName = "node.sock"

const (
	// mostConns is how many connections are served at once.
	mostConns = 1024
	// stall is how long a client may take to send what it has announced, or to take
	// an answer.
	stall = 30 * time.Second
)

// Listen opens the socket of the node in dir, which must own the arena there: a socket
// that is left is a dead node's.
func Listen(dir string) (net.Listener, error) {
	name := filepath.Join(dir, SocketName)
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", name, err)
	}
	l, err := net.Listen("unix", name)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(name, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Server serves an arena to the processes of its host, and what is in tiers below it.
type Server struct {
	store  *arena.Store
	stack  *stack.Stack // nil = there is nothing below
	epochs *Epochs      // nil = there are none
	own    *ownTails    // nil = other hosts have no copies of tails
	log    *slog.Logger

	// patience is how long the end waits for requests that are being answered.
	patience time.Duration

	mu    sync.Mutex
	conns map[net.Conn]bool
	done  sync.WaitGroup

	erasures erasures
	peers    func() Peers
	surveys  surveys
}

// offered is how many blocks a new server offers to the tiers below it.
const offered = 4096

// ServerConfig says what is served. The caller closes what is in it after Serve has ended.
type ServerConfig struct {
	Store *arena.Store // required
	// Below is the stack of which Store is the near store; nil = there is none. What came
	// last into the arena is offered to it again at the start: the node before may have been
	// killed before it was written.
	Below *stack.Stack
	// Tails has copies of tails on other hosts; nil = there are none.
	Tails FarTails
	// Peers says who the other hosts are, within a second; nil = there are none.
	Peers func() Peers
	// Epochs are the records of the models; nil = all versions of a model are alike.
	Epochs *Epochs
	Log    *slog.Logger // default: silent
}

// NewServer makes a server.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Below != nil {
		cfg.Below.Owe(cfg.Epochs.restored()...)
		cfg.Below.Offer(cfg.Store.Newest(offered))
	}
	s := &Server{store: cfg.Store, stack: cfg.Below, epochs: cfg.Epochs, log: cfg.Log, patience: 5 * time.Second, conns: map[net.Conn]bool{}, peers: cfg.Peers}
	if cfg.Tails != nil {
		s.own = &ownTails{far: cfg.Tails, byNo: map[uint64]kvcache.TailSpec{}}
	}
	return s
}

// Serve serves until ctx ends, closes l and all connections, and waits for them, but 5 s at
// most: a request may wait for a disk that hangs. The error is nil when ctx has ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	if s.epochs != nil {
		s.done.Go(func() { s.epochs.run(ctx, s.store, s.stack) })
	}
	if s.stack != nil {
		s.done.Go(func() { s.settle(ctx) })
	}
	for {
		c, err := accept.Next(ctx, l, s.log)
		if err != nil {
			l.Close()
			s.end()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept: %w", err)
		}
		if !s.begin(c) {
			c.Close()
			s.log.Warn("KV node: too many connections", "most", mostConns)
			continue
		}
		s.done.Go(func() {
			defer s.forget(c)
			p := &peer{s: s, c: c, r: bufio.NewReaderSize(c, 64<<10), writers: map[uint64]*arena.TailWriter{}}
			if err := p.serve(ctx); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				s.log.Info("KV node: connection ended", "err", err)
			}
		})
	}
}

// begin notes a connection, if it is not one too many.
func (s *Server) begin(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= mostConns {
		return false
	}
	s.conns[c] = true
	return true
}

// forget closes a connection.
func (s *Server) forget(c net.Conn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// end closes all connections and waits for them, as long as that is worth it.
func (s *Server) end() {
	s.mu.Lock()
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		s.done.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(s.patience):
		s.log.Warn("KV node: requests are still being answered and are left alone", "after", s.patience)
	}
}

// peer is one connection of a client, served by one goroutine. Its buffers are used again
// for each request, so that an append allocates nothing.
type peer struct {
	s *Server
	c net.Conn
	r *bufio.Reader

	head [headLen]byte
	body []byte // the last request's, kept for its memory
	data []byte // likewise
	out  []byte // the answer
	ids  []int32
	// writers are of tails that were appended to here.
	writers map[uint64]*arena.TailWriter
}

// serve answers requests until the connection ends, and says why it did.
func (p *peer) serve(ctx context.Context) error {
	for {
		if err := p.c.SetDeadline(time.Time{}); err != nil {
			return err
		}
		if _, err := io.ReadFull(p.r, p.head[:]); err != nil {
			return err
		}
		h, err := parseHead(p.head[:], mostBody)
		if err != nil {
			return err
		}
		if err := p.c.SetDeadline(time.Now().Add(stall)); err != nil {
			return err
		}
		if p.body, err = readBody(p.r, h.body, p.body); err != nil {
			return err
		}
		if p.data, err = readBody(p.r, h.data, p.data); err != nil {
			return err
		}
		if err := p.answer(ctx, op(h.what), cursorOf(p.body)); err != nil {
			return err
		}
		// Room for an unusual request is not kept.
		if cap(p.body) > 1<<20 {
			p.body = nil
		}
		if cap(p.data) > 4<<20 {
			p.data = nil
		}
	}
}

// reply sends an answer.
func (p *peer) reply(err error, body []byte) error {
	what, text := statusOf(err)
	if what != statusDone {
		body = text
	}
	p.out = append(p.out[:0], make([]byte, headLen)...)
	head{what: uint8(what), body: uint32(len(body))}.put(p.out)
	p.out = append(p.out, body...)
	_, werr := p.c.Write(p.out)
	if cap(p.out) > 4<<20 {
		p.out = nil
	}
	return werr
}

// errBad is the answer to a body that is not what its operation wants.
var errBad = errors.New("bad request")

// answer does one operation. An error ends the connection.
func (p *peer) answer(ctx context.Context, what op, c cursor) error {
	switch what {
	case opPut:
		return p.put(ctx, c)
	case opAppend:
		no, err := p.append(ctx, c)
		return p.reply(err, p.grew(no, err))
	}
	body, err := p.do(ctx, what, &c)
	if c.Bad {
		body, err = nil, errBad
	}
	return p.reply(err, body)
}

// do does an operation that has no data.
func (p *peer) do(ctx context.Context, what op, c *cursor) (body []byte, err error) {
	st := p.s.store
	switch what {
	case opLongest:
		q := c.query()
		if c.Bad {
			return nil, errBad
		}
		if !p.s.epochs.admits(q, time.Now()) {
			return appendMatch(nil, kvcache.Match{}), nil
		}
		m, err := st.Longest(ctx, q)
		return appendMatch(nil, m), err
	case opFetch, opResume:
		return p.fetch(ctx, c, what == opResume)
	case opEpochs, opSetEpoch:
		return p.s.epoch(what, c.Rest())
	case opGet:
		return p.get(ctx, c)
	case opLend:
		return p.lend(ctx, c)
	case opReserve, opPublish:
		return p.room(ctx, what, c)
	case opOpen, opRotate, opRead, opForget, opTails, opName:
		return p.tail(ctx, what, c)
	case opRefused:
		if ref := c.Ref(); !c.Bad {
			err = st.Refused(ctx, ref)
		}
	case opDrop:
		if f := kvcache.Fingerprint(c.Key()); !c.Bad {
			err = p.s.drop(ctx, f)
		}
	case opLabel:
		var l kvcache.Label
		f := kvcache.Fingerprint(c.Key())
		if err = json.Unmarshal(c.Rest(), &l); err == nil && !c.Bad {
			err = p.s.label(ctx, f, l)
		}
	case opHello:
		return json.Marshal(hello{Data: st.Data(), ID: st.ID(), Far: p.s.stack != nil, Tails: p.s.own != nil})
	case opStats:
		return json.Marshal(st.Stats())
	case opModels:
		models, err := st.Models(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(models)
	case opKnown:
		list, err := p.s.known(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(list)
	case opPeers:
		return p.s.others()
	case opSurvey:
		return p.s.survey(ctx, c)
	case opErase:
		return p.s.erase(ctx, string(c.Rest()))
	case opRoom:
		if limit := c.Size(); !c.Bad {
			err = errors.Join(st.Sweep(ctx, time.Now()), st.MakeRoom(ctx, int64(limit)))
		}
	default:
		err = fmt.Errorf("operation %d is not known", what)
	}
	return nil, err
}

// hello is what a client must know to read.
type hello struct {
	Data string   `json:"data"`
	ID   [16]byte `json:"id"`
	// Far says that the node has far tiers, which fetch asks.
	Far bool `json:"far,omitempty"`
	// Tails says that other hosts have copies of tails.
	Tails bool `json:"tails,omitempty"`
}

// label names a model in all tiers that there are.
func (s *Server) label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	announced := s.epochs.announce(f, l, time.Now())
	if s.stack != nil {
		return errors.Join(announced, s.stack.Label(ctx, f, l))
	}
	return errors.Join(announced, s.store.Label(ctx, f, l))
}

// fetch looks up what there is in all tiers, in the time that the client gives. For a stream
// that goes on, no time is a look-up in memory only.
func (p *peer) fetch(ctx context.Context, c *cursor, resume bool) ([]byte, error) {
	within, q := time.Duration(c.Size()), c.query()
	near := resume && within == 0
	if c.Bad || p.s.stack == nil && !near {
		return nil, errBad
	}
	if q.Resume = resume; !p.s.epochs.admits(q, time.Now()) {
		return appendMatch(nil, kvcache.Match{}), nil
	}
	if near {
		m, err := p.s.store.Longest(ctx, q)
		return appendMatch(nil, m), err
	}
	ctx, cancel := context.WithTimeout(ctx, min(within, stall/2))
	defer cancel()
	m, err := p.s.stack.Longest(ctx, q)
	return appendMatch(nil, m), err
}

// get lends a block.
func (p *peer) get(ctx context.Context, c *cursor) ([]byte, error) {
	ref, reader, slot, ticket := c.Ref(), c.Take(8), c.U32(), c.Size()
	if c.Bad {
		return nil, errBad
	}
	at, size, err := p.s.store.Lend(ctx, fmt.Sprintf("%x", reader), slot, arena.Ticket(ticket), ref)
	if err != nil {
		return nil, err
	}
	id := p.s.store.ID()
	return kvwire.AppendSize(kvwire.AppendSize(id[:], int(at)), int(size)), nil
}

// put takes a frame in: first whether it is wanted, so that a shared prefix that is there
// already is not sent, then the frame, straight into the arena. A client that dies or
// stalls in the middle ends its connection, and the room is free again.
func (p *peer) put(ctx context.Context, c cursor) error {
	ref, size := c.Ref(), c.Size()
	if c.Bad {
		return p.reply(errBad, nil)
	}
	r, err := p.s.store.Reserve(ctx, ref, int64(size))
	if err != nil || r == nil {
		return p.reply(err, []byte{0})
	}
	defer r.Cancel()
	if err := p.reply(nil, []byte{1}); err != nil {
		return err
	}
	if _, err := io.ReadFull(p.r, r.Bytes()); err != nil {
		return err
	}
	put, err := r.Commit()
	if err == nil && p.s.stack != nil {
		p.s.stack.Wrote(put)
	}
	return p.reply(err, nil)
}
