//go:build unix

package kvevents

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/zmtp"
)

// patience is how long something that must happen may take.
const patience = time.Minute

// await waits until something holds.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("%s: it does not come", what)
		}
	}
}

// listen listens on an address of loopback; "" is any.
func listen(t *testing.T, at string) net.Listener {
	t.Helper()
	if at == "" {
		at = "127.0.0.1:0"
	}
	var l net.Listener
	await(t, "the address is free", func() bool {
		var err error
		l, err = net.Listen("tcp", at)
		return err == nil
	})
	return l
}

// station is a publisher that runs.
type station struct {
	*Publisher
	at, replay string
	stop       func()
}

// serve runs a publisher, at the addresses of another one if that is not nil.
func serve(t *testing.T, cfg PublisherConfig, before *station) *station {
	t.Helper()
	s := &station{Publisher: NewPublisher(cfg)}
	if before != nil {
		s.at, s.replay = before.at, before.replay
	}
	l, r := listen(t, s.at), listen(t, s.replay)
	s.at, s.replay = l.Addr().String(), r.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l, r) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(s.stop)
	return s
}

// log is what a subscriber was told, since it began anew.
type log struct {
	mu     sync.Mutex
	hashes []uint64 // of what was stored
}

func (l *log) batch(b Batch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range b.Events {
		for _, h := range e.Hashes {
			l.hashes = append(l.hashes, h.Number())
		}
		if e.Kind == AllBlocksCleared {
			l.hashes = nil
		}
	}
}

func (l *log) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hashes = nil
}

// has says whether it has numbers 0 to n-1 in order.
func (l *log) has(n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	want := make([]uint64, n)
	for i := range want {
		want[i] = uint64(i)
	}
	return slices.Equal(want, l.hashes) || n == 0 && len(l.hashes) == 0
}

// follow runs a subscriber.
func follow(t *testing.T, cfg SubscriberConfig) (*Subscriber, *log) {
	t.Helper()
	l := &log{}
	cfg.OnBatch, cfg.OnReset = l.batch, l.reset
	s, err := NewSubscriber(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { s.Run(ctx) })
	t.Cleanup(func() { cancel(); done.Wait() })
	return s, l
}

// tell has a publisher tell that blocks from to to-1 are there.
func (s *station) tell(from, to int) {
	for i := from; i < to; i++ {
		s.Publish(Event{Kind: BlockStored, Hashes: []Hash{HashNumber(uint64(i))}, BlockSize: 1})
	}
}

// TestFollow: what was told before a subscriber came it is told again, then what comes, and
// nothing twice.
func TestFollow(t *testing.T) {
	p := serve(t, PublisherConfig{Topic: "kv@node@m"}, nil)
	p.tell(0, 100)
	await(t, "sent", func() bool { return p.Stats().Batches > 0 })
	sub, l := follow(t, SubscriberConfig{Address: "tcp://" + p.at, Replay: "tcp://" + p.replay, Topic: "kv@"})
	await(t, "told again", func() bool { return l.has(100) })
	p.tell(100, 5000)
	await(t, "told", func() bool { return l.has(5000) })
	if st := sub.Stats(); st.Wrong != 0 || !st.Connected {
		t.Errorf("%+v", st)
	}
}

// TestTopic: what is of another topic is not sent.
func TestTopic(t *testing.T) {
	p := serve(t, PublisherConfig{Topic: "kv@a"}, nil)
	_, other := follow(t, SubscriberConfig{Address: "tcp://" + p.at, Topic: "kv@b"})
	_, own := follow(t, SubscriberConfig{Address: "tcp://" + p.at, Topic: "kv@"})
	await(t, "both are there", func() bool { return p.wanted() == 2 })
	p.tell(0, 10)
	await(t, "told", func() bool { return own.has(10) })
	if !other.has(0) {
		t.Error("what is of another topic is sent")
	}
}

// wanted is how many subscribers have said what they want.
func (p *Publisher) wanted() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.peers {
		if len(f.topics) > 0 {
			n++
		}
	}
	return n
}

// TestRestart: a publisher that is started again is followed, and what the one before has told
// does not count any more.
func TestRestart(t *testing.T) {
	p := serve(t, PublisherConfig{}, nil)
	sub, l := follow(t, SubscriberConfig{Address: "tcp://" + p.at, Replay: "tcp://" + p.replay})
	p.tell(0, 50)
	await(t, "told", func() bool { return l.has(50) })
	p.stop()
	p = serve(t, PublisherConfig{}, p)
	p.tell(0, 3)
	await(t, "told by the next one", func() bool { return l.has(3) })
	if st := sub.Stats(); st.Resets < 2 {
		t.Errorf("%+v", st)
	}
}

// fake is a publisher under the test's control.
type fake struct {
	t      *testing.T
	pub    net.Listener
	replay net.Listener
}

func (f *fake) accept(l net.Listener, kind string, peers ...string) *zmtp.Conn {
	f.t.Helper()
	c, err := l.Accept()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	z, err := zmtp.Handshake(c, zmtp.Config{Type: kind, Peers: peers, Most: 1 << 20, Stall: patience})
	if err != nil {
		f.t.Fatal(err)
	}
	return z
}

func (f *fake) payload(seq uint64) []byte {
	b := Batch{Events: []Event{{Kind: BlockStored, Hashes: []Hash{HashNumber(seq)}, BlockSize: 1}}}
	return Encoding{Arrays: true}.Append(nil, &b)
}

// answer tells again what lies from the number that is asked for on, from least to end.
func (f *fake) answer(z *zmtp.Conn, least, end uint64, want uint64) {
	f.t.Helper()
	ask, err := z.Read()
	if err != nil || len(ask) != 2 || binary.BigEndian.Uint64(ask[1]) != want {
		f.t.Fatalf("asked %q, %v, want %d", ask, err, want)
	}
	for seq := max(least, want); seq < end; seq++ {
		f.write(z, nil, binary.BigEndian.AppendUint64(nil, seq), f.payload(seq)) // without the topic, as old ones do
	}
	f.write(z, nil, nil, binary.BigEndian.AppendUint64(nil, endSeq), nil)
}

func (f *fake) write(z *zmtp.Conn, frames ...[]byte) {
	f.t.Helper()
	if err := z.Write(frames...); err != nil {
		f.t.Fatal(err)
	}
}

// TestGap: what is missing is asked for, and what is not there any more makes the subscriber
// begin anew.
func TestGap(t *testing.T) {
	f := &fake{t: t, pub: listen(t, ""), replay: listen(t, "")}
	defer f.pub.Close()
	defer f.replay.Close()
	sub, l := follow(t, SubscriberConfig{Address: "tcp://" + f.pub.Addr().String(), Replay: "tcp://" + f.replay.Addr().String()})
	z := f.accept(f.pub, "PUB", "SUB")
	f.answer(f.accept(f.replay, "ROUTER", "DEALER"), 0, 2, 0)
	live := func(seq uint64) { f.write(z, nil, binary.BigEndian.AppendUint64(nil, seq), f.payload(seq)) }
	live(1) // is there already
	live(2)
	await(t, "followed", func() bool { return l.has(3) })
	live(5)
	f.answer(f.accept(f.replay, "ROUTER", "DEALER"), 0, 6, 3)
	await(t, "told again", func() bool { return l.has(6) })
	live(9)
	f.answer(f.accept(f.replay, "ROUTER", "DEALER"), 8, 9, 6)
	await(t, "begun anew", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return slices.Equal([]uint64{8, 9}, l.hashes)
	})
	f.write(z, nil, binary.BigEndian.AppendUint64(nil, 10), []byte("no batch"))
	await(t, "forgotten", func() bool { return l.has(0) })
	if st := sub.Stats(); st.Gaps != 2 || st.Wrong != 1 || st.Resets != 3 {
		t.Errorf("%+v", st)
	}
}

// TestHostile: what cannot be read ends the connection, and nothing that was told on it counts any
// more; the next one is followed as if nothing had been.
func TestHostile(t *testing.T) {
	f := &fake{t: t, pub: listen(t, ""), replay: listen(t, "")}
	defer f.pub.Close()
	defer f.replay.Close()
	sub, l := follow(t, SubscriberConfig{Address: "tcp://" + f.pub.Addr().String(), Most: 1 << 20})
	one := binary.BigEndian.AppendUint64(nil, 1)
	many := []byte("\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x91\x92\xacBlockRemoved\xdd\x00\x02\x00\x01")
	many = append(append(many, make([]byte, mostHashes+1)...), 0) // one hash more than is taken, a byte each
	for i, frames := range [][][]byte{
		{[]byte("x"), []byte("short"), nil},
		{nil},
		{nil, one, nil},
		{nil, one, []byte("no batch")},
		{nil, one, many},
		{nil, one, make([]byte, 1<<20)}, // more than is taken
	} {
		z := f.accept(f.pub, "PUB", "SUB")
		f.write(z, nil, make([]byte, 8), f.payload(0))
		await(t, "followed", func() bool { return l.has(1) })
		_ = z.Write(frames...) // what is too long is cut off on the way
		await(t, "forgotten", func() bool { return l.has(0) && sub.Stats().Wrong == uint64(i+1) && !sub.Stats().Connected })
	}
}

// TestStopped: a subscriber that reads nothing holds up neither the publisher nor another
// one, and what waits for it is bounded.
func TestStopped(t *testing.T) {
	p := serve(t, PublisherConfig{Queue: 4}, nil)
	c, err := net.Dial("tcp", p.at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	z, err := zmtp.Handshake(c, zmtp.Config{Type: "SUB", Peers: []string{"PUB"}, Most: 1 << 20, Stall: patience})
	if err != nil {
		t.Fatal(err)
	}
	if err := z.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	await(t, "subscribed", func() bool { return p.wanted() == 1 })
	_, l := follow(t, SubscriberConfig{Address: "tcp://" + p.at, Replay: "tcp://" + p.replay})
	await(t, "the other one, too", func() bool { return p.wanted() == 2 })
	big := Event{Kind: BlockRemoved, Hashes: make([]Hash, 8192)}
	for i := range big.Hashes {
		big.Hashes[i] = HashNumber(1 << 60)
	}
	for range 200 { // 70 KB each: more than the sockets take
		p.Publish(big)
	}
	await(t, "left out", func() bool { return p.Stats().Dropped > 0 })
	p.Publish(Event{Kind: AllBlocksCleared})
	p.tell(0, 7)
	await(t, "told the other one", func() bool { return l.has(7) })
}

// TestOverflow: where more is told than is sent, all is said to be gone, and never too much
// to be there.
func TestOverflow(t *testing.T) {
	p := NewPublisher(PublisherConfig{Pending: 8})
	for i := range 20 { // nobody sends yet
		p.Publish(Event{Kind: BlockStored, Hashes: []Hash{HashNumber(uint64(i))}})
	}
	if p.pending[0].Kind != AllBlocksCleared || len(p.pending) > 9 {
		t.Errorf("%d events, the first is %v", len(p.pending), p.pending[0].Kind)
	}
	if last := p.pending[len(p.pending)-1]; last.Hashes[0] != HashNumber(19) || p.Stats().Lost == 0 {
		t.Errorf("the last is %+v", last)
	}
}

func TestCutBatch(t *testing.T) {
	events := make([]Event, 3000)
	for i := range events {
		events[i] = Event{Kind: BlockStored, IDs: make([]int32, i%1000)}
	}
	n := 0
	for rest := events; len(rest) > 0; {
		var batch []Event
		batch, rest = cutBatch(rest)
		b := Batch{Events: batch}
		if size := len(Encoding{}.Append(nil, &b)); len(batch) == 0 || len(batch) > mostEvents || size > 2*mostBatch {
			t.Fatalf("a batch of %d events in %d bytes", len(batch), size)
		}
		n += len(batch)
	}
	if n != len(events) {
		t.Errorf("%d events of %d", n, len(events))
	}
}

func TestAddresses(t *testing.T) {
	for address, want := range map[string][2]string{
		"tcp://127.0.0.1:5557": {"tcp", "127.0.0.1:5557"}, "ipc:///run/kv": {"unix", "/run/kv"}, "tcp://[::1]:1": {"tcp", "[::1]:1"},
		"127.0.0.1:5557": {}, "tcp://here": {}, "ipc://": {}, "http://a:1": {},
	} {
		network, at, err := SplitAddress(address)
		if (err != nil) != (want[0] == "") || err == nil && want != [2]string{network, at} {
			t.Errorf("%s: %s %s %v", address, network, at, err)
		}
	}
}
