//go:build unix

package kvevents

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/accept"
	"github.com/kvmesh/kvmesh/internal/zmtp"
)

// PublisherConfig says how a publisher tells events.
type PublisherConfig struct {
	// Topic is the first frame of all messages; subscribers choose by its beginning.
	Topic string
	// Encoding is how events are written.
	Encoding Encoding
	// Pending is the most events that wait to be sent; 0 is 65536.
	Pending int
	// Buffer is how many batches are kept to be told again, at most 64 MiB of them; 0 is 10000.
	Buffer int
	// Queue is how many batches wait for one subscriber; 0 is 256.
	Queue int
	// Log gets what happens to subscribers, never events; nil is silent.
	Log *slog.Logger
}

const (
	// mostEvents and mostBatch bound one batch, in events and, about, in bytes.
	mostEvents = 1024
	mostBatch  = 256 << 10
	// mostKept is the bytes of the batches that are kept.
	mostKept = 64 << 20
	// mostPeers is how many connections there are at once, and mostTopics what one may ask for.
	mostPeers  = 64
	mostTopics = 64
	// mostAsked is the bytes of what a subscriber sends in one message.
	mostAsked = 4 << 10
	// stall is how long a peer may take for its handshake, and to take one batch.
	stall = 10 * time.Second
	// idleTime is how soon a subscriber that misses the last batch hears of one.
	idleTime = time.Second
)

// Publisher tells its subscribers of events. It is safe for concurrent use.
type Publisher struct {
	cfg  PublisherConfig
	wake chan struct{}

	mu      sync.Mutex // guards what follows; held for moments only
	pending []Event
	peers   map[*follower]bool
	conns   int
	behind  bool // a subscriber misses the last batch, or one before
	kept    []message
	bytes   int // of kept

	sent, lost, dropped atomic.Uint64
	done                sync.WaitGroup
}

// message is one batch, as it is sent.
type message struct {
	seq     uint64
	payload []byte
}

// follower is one subscriber.
type follower struct {
	queue  chan message
	topics map[string]bool // guarded by the publisher's lock
}

// NewPublisher makes a publisher. Events that are told before Serve wait for it.
func NewPublisher(cfg PublisherConfig) *Publisher {
	cfg.Pending = cmp.Or(cfg.Pending, 1<<16)
	cfg.Buffer = cmp.Or(cfg.Buffer, 10000)
	cfg.Queue = cmp.Or(cfg.Queue, 256)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Publisher{cfg: cfg, wake: make(chan struct{}, 1), peers: map[*follower]bool{}}
}

// Publish tells an event. It never waits and keeps what e refers to. Where too many wait to be
// sent, they are given up and AllBlocksCleared takes their place.
func (p *Publisher) Publish(e Event) {
	p.mu.Lock()
	if len(p.pending) >= p.cfg.Pending {
		p.lost.Add(uint64(len(p.pending)))
		p.pending = append(p.pending[:0:0], Event{Kind: AllBlocksCleared})
	}
	p.pending = append(p.pending, e)
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// PublisherStats are the counters of a publisher.
type PublisherStats struct {
	// Batches were sent; Lost are events that AllBlocksCleared has taken the place of; Dropped
	// are batches that were left out for one subscriber or another.
	Batches, Lost, Dropped uint64
	// Subscribers are there now.
	Subscribers int
}

// Stats returns the counters.
func (p *Publisher) Stats() PublisherStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return PublisherStats{Batches: p.sent.Load(), Lost: p.lost.Load(), Dropped: p.dropped.Load(), Subscribers: len(p.peers)}
}

// Serve sends what is published to whoever connects to l, and tells those again what came
// before that connect to replay, which may be nil, until ctx ends. It closes both. It is to be
// called once. The error is nil when ctx has ended.
func (p *Publisher) Serve(ctx context.Context, l, replay net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	p.done.Go(func() { p.run(ctx) })
	p.done.Go(func() { ended <- p.accept(ctx, l, "PUB", []string{"SUB", "XSUB"}, p.follow) })
	if replay != nil {
		p.done.Go(func() { ended <- p.accept(ctx, replay, "ROUTER", []string{"DEALER", "REQ"}, p.again) })
	}
	err := <-ended
	cancel()
	p.done.Wait()
	return err
}

// accept serves the connections of one socket. Each has a goroutine for its handshake, too, so
// that a peer that says nothing holds up nobody but itself; there are so many connections at
// most, for both sockets together.
func (p *Publisher) accept(ctx context.Context, l net.Listener, kind string, peers []string, serve func(context.Context, *zmtp.Conn) error) error {
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		c, err := accept.Next(ctx, l, p.cfg.Log)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		p.mu.Lock()
		full := p.conns >= mostPeers
		if !full {
			p.conns++
		}
		p.mu.Unlock()
		if full {
			c.Close()
			p.cfg.Log.Warn("KV events: too many connections", "most", mostPeers)
			continue
		}
		p.done.Go(func() {
			defer context.AfterFunc(ctx, func() { c.Close() })()
			z, err := zmtp.Handshake(c, zmtp.Config{Type: kind, Peers: peers, Most: mostAsked, Stall: stall})
			if err == nil {
				err = serve(ctx, z)
			}
			c.Close()
			if ctx.Err() == nil {
				p.cfg.Log.Info("KV events: connection ended", "socket", kind, "err", err)
			}
			p.mu.Lock()
			p.conns--
			p.mu.Unlock()
		})
	}
}

// follow serves a subscriber until its connection ends.
func (p *Publisher) follow(ctx context.Context, z *zmtp.Conn) error {
	f := &follower{queue: make(chan message, p.cfg.Queue), topics: map[string]bool{}}
	p.mu.Lock()
	p.peers[f] = true
	p.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	written := make(chan struct{})
	go func() {
		defer close(written)
		f.write(ctx, z, []byte(p.cfg.Topic))
	}()
	err := p.listen(f, z)
	p.mu.Lock()
	delete(p.peers, f)
	p.mu.Unlock()
	cancel()
	z.Close()
	<-written
	return err
}

// write sends a subscriber what is for it. What fails ends the connection.
func (f *follower) write(ctx context.Context, z *zmtp.Conn, topic []byte) {
	defer z.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-f.queue:
			if z.Write(topic, binary.BigEndian.AppendUint64(nil, m.seq), m.payload) != nil {
				return
			}
		}
	}
}

// listen takes in what a subscriber wants, until its connection ends.
func (p *Publisher) listen(f *follower, z *zmtp.Conn) error {
	for {
		m, err := z.Read()
		if err != nil {
			return err
		}
		if len(m) != 1 || len(m[0]) == 0 || m[0][0] > 1 {
			continue // of no meaning to a PUB
		}
		topic := string(m[0][1:])
		p.mu.Lock()
		if m[0][0] == 0 {
			delete(f.topics, topic)
		} else {
			f.topics[topic] = true
		}
		many := len(f.topics) > mostTopics
		p.mu.Unlock()
		if many {
			return errors.New("too many topics")
		}
	}
}

// again tells what came before, as often as a peer asks. It works on the list of batches as it
// is when the peer asks; those that are sent meanwhile come by the other socket.
func (p *Publisher) again(_ context.Context, z *zmtp.Conn) error {
	for {
		ask, err := z.Read()
		if err != nil {
			return err
		}
		if len(ask) != 2 || len(ask[0]) != 0 || len(ask[1]) != 8 {
			return errors.New("it asks for no sequence number")
		}
		first := binary.BigEndian.Uint64(ask[1])
		p.mu.Lock()
		kept := p.kept // which is never changed in place
		p.mu.Unlock()
		for _, m := range kept {
			if m.seq < first {
				continue
			}
			if err := z.Write(nil, []byte(p.cfg.Topic), binary.BigEndian.AppendUint64(nil, m.seq), m.payload); err != nil {
				return err
			}
		}
		if err := z.Write(nil, nil, binary.BigEndian.AppendUint64(nil, endSeq), nil); err != nil {
			return err
		}
	}
}

// endSeq ends what is told again.
const endSeq = 1<<64 - 1

// run makes batches of what is published and gives them to the subscribers, until ctx ends.
func (p *Publisher) run(ctx context.Context) {
	idle := time.NewTicker(idleTime)
	defer idle.Stop()
	for seq := uint64(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-idle.C:
		}
		p.mu.Lock()
		events := p.pending
		p.pending = nil
		behind := p.behind && len(events) == 0
		p.behind = p.behind && !behind
		p.mu.Unlock()
		if behind {
			// What shows who misses something that there is a gap.
			p.send(message{seq, p.cfg.Encoding.Append(nil, &Batch{Time: now()})})
			seq++
		}
		for len(events) > 0 {
			var b Batch
			b.Events, events = cutBatch(events)
			b.Time = now()
			p.send(message{seq, p.cfg.Encoding.Append(nil, &b)})
			seq++
		}
	}
}

// now is the time of a batch.
func now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }

// cutBatch takes the events of one batch off the beginning.
func cutBatch(events []Event) (batch, rest []Event) {
	size := 0
	for i := range events {
		if i == mostEvents || size > mostBatch {
			return events[:i], events[i:]
		}
		size += 128 + 36*len(events[i].Hashes) + 5*len(events[i].IDs)
	}
	return events, nil
}

// send keeps a batch and puts it into the queues of those that want it, where there is room. The
// bytes of a batch are there once, whatever number of subscribers it waits for.
func (p *Publisher) send(m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = append(p.kept, m)
	p.bytes += len(m.payload)
	for len(p.kept) > p.cfg.Buffer || p.bytes > mostKept && len(p.kept) > 1 {
		p.bytes -= len(p.kept[0].payload)
		p.kept = p.kept[1:]
	}
	p.sent.Add(1)
	for f := range p.peers {
		if !f.wants(p.cfg.Topic) {
			continue
		}
		select {
		case f.queue <- m:
		default:
			p.dropped.Add(1)
			p.behind = true
		}
	}
}

// wants says whether a subscriber has asked for a topic.
func (f *follower) wants(topic string) bool {
	for prefix := range f.topics {
		if len(topic) >= len(prefix) && topic[:len(prefix)] == prefix {
			return true
		}
	}
	return false
}
