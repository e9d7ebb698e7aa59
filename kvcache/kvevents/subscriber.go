package kvevents

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/internal/zmtp"
)

// SubscriberConfig says whom a subscriber follows.
type SubscriberConfig struct {
	// Address is where the publisher's PUB socket listens: tcp://HOST:PORT or ipc://PATH.
	Address string
	// Replay is where its ROUTER socket listens; "" is nowhere, and then what is missed once
	// makes the subscriber begin anew.
	Replay string
	// Topic is what topics begin with that are followed; "" is all.
	Topic string
	// Most is the bytes that a message may have; 0 is 8 MiB.
	Most int
	// OnBatch gets each batch, in order and once. OnReset is called where nothing of what was told
	// before counts any more: at the beginning and the end of a connection, too. Neither is called while the other is. What
	// they take their time for the publisher keeps or leaves out. Both are required.
	OnBatch func(Batch)
	OnReset func()
	// Log gets what happens to the connection, never events; nil is silent.
	Log *slog.Logger
}

// Validate says what is wrong with a configuration.
func (c SubscriberConfig) Validate() error {
	if _, _, err := SplitAddress(c.Address); err != nil {
		return err
	}
	if _, _, err := SplitAddress(c.Replay); c.Replay != "" && err != nil {
		return err
	}
	if c.OnBatch == nil || c.OnReset == nil || c.Most < 0 {
		return errors.New("KV events: nobody to tell them to, or a negative bound")
	}
	return nil
}

// SplitAddress reads an address of ZeroMQ into the network and address that package net wants.
func SplitAddress(address string) (network, at string, err error) {
	if path, ok := strings.CutPrefix(address, "ipc://"); ok && path != "" {
		return "unix", path, nil
	}
	at, ok := strings.CutPrefix(address, "tcp://")
	if _, _, err := net.SplitHostPort(at); !ok || err != nil {
		return "", "", fmt.Errorf("KV events: %q is no address: want tcp://HOST:PORT or ipc://PATH", address)
	}
	return "tcp", at, nil
}

const (
	// leastWait and mostWait bound the time between two tries to connect, which doubles.
	leastWait = 100 * time.Millisecond
	mostWait  = 5 * time.Second
	// replayTime bounds one replay.
	replayTime = 30 * time.Second
)

// Subscriber follows one publisher.
type Subscriber struct {
	cfg  SubscriberConfig
	next uint64 // the sequence number that is to come
	any  bool   // there was one

	batches, gaps, resets, wrong atomic.Uint64
	connected                    atomic.Bool
}

// NewSubscriber makes a subscriber, which does nothing before Run.
func NewSubscriber(cfg SubscriberConfig) (*Subscriber, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Most = cmp.Or(cfg.Most, 8<<20)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Subscriber{cfg: cfg}, nil
}

// SubscriberStats are the counters of a subscriber.
type SubscriberStats struct {
	// Batches were told to OnBatch; Gaps were noticed in the sequence; Resets are calls of OnReset;
	// Wrong are messages that were no batches.
	Batches, Gaps, Resets, Wrong uint64
	// Connected says whether the publisher is there.
	Connected bool
}

// Stats returns the counters. It is safe for concurrent use.
func (s *Subscriber) Stats() SubscriberStats {
	return SubscriberStats{s.batches.Load(), s.gaps.Load(), s.resets.Load(), s.wrong.Load(), s.connected.Load()}
}

// Run follows the publisher until ctx ends, and connects again where the connection ends. It is
// to be called once.
func (s *Subscriber) Run(ctx context.Context) {
	for wait := leastWait; ctx.Err() == nil; {
		began := time.Now()
		err := s.session(ctx)
		if s.connected.Swap(false) {
			s.reset() // who is not there holds nothing that anybody knows of
			if time.Since(began) > mostWait {
				wait = leastWait
			}
		}
		if ctx.Err() != nil {
			return
		}
		s.cfg.Log.Info("KV events: not connected", "address", s.cfg.Address, "err", err, "again_in", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
		wait = min(2*wait, mostWait)
	}
}

// dial connects to a socket, as one of a kind. The connection ends with ctx.
func (s *Subscriber) dial(ctx context.Context, address, kind string, peers ...string) (*zmtp.Conn, func(), error) {
	network, at, err := SplitAddress(address)
	if err != nil {
		return nil, nil, err
	}
	d := net.Dialer{Timeout: stall, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}}
	c, err := d.DialContext(ctx, network, at)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	z, err := zmtp.Handshake(c, zmtp.Config{Type: kind, Peers: peers, Most: s.cfg.Most, Stall: stall})
	if err != nil {
		stop()
		return nil, nil, err
	}
	return z, func() { stop(); z.Close() }, nil
}

// session is one connection. What was known before is forgotten: the process may be another, and
// numbers its batches from 0 again. The subscription goes out before what came earlier is asked
// for, so that nothing falls between the two; what comes twice is seen by its number.
func (s *Subscriber) session(ctx context.Context) error {
	z, end, err := s.dial(ctx, s.cfg.Address, "SUB", "PUB", "XPUB")
	if err != nil {
		return err
	}
	defer end()
	if err := z.Write(append([]byte{1}, s.cfg.Topic...)); err != nil {
		return err
	}
	s.connected.Store(true)
	s.next, s.any = 0, false
	s.reset()
	// What comes meanwhile waits in the connection.
	s.replay(ctx)
	for {
		m, err := z.Read()
		if errors.Is(err, zmtp.ErrProtocol) {
			s.wrong.Add(1)
		}
		if err != nil {
			return err
		}
		if len(m) != 3 || len(m[1]) != 8 || !strings.HasPrefix(string(m[0]), s.cfg.Topic) {
			s.wrong.Add(1)
			return errors.New("a message that has no batch")
		}
		seq := binary.BigEndian.Uint64(m[1])
		if s.any && seq > s.next {
			s.gaps.Add(1)
			s.replay(ctx)
		}
		if err := s.take(seq, m[2]); err != nil {
			return err
		}
	}
}

// reset begins anew.
func (s *Subscriber) reset() {
	s.resets.Add(1)
	s.cfg.OnReset()
}

// take takes in a batch, unless it was there before. The error is of one that is none. The connection
// is to end with it, so that a publisher which tells such things is heard again in a while and not
// at the speed of the network.
func (s *Subscriber) take(seq uint64, payload []byte) error {
	if s.any && seq < s.next {
		return nil
	}
	if s.any && seq > s.next {
		s.reset() // what is missing is lost
	}
	s.next, s.any = seq+1, true
	b, err := Decode(payload)
	if err != nil {
		s.wrong.Add(1)
		return fmt.Errorf("batch %d is not understood: %w", seq, err)
	}
	s.batches.Add(1)
	s.cfg.OnBatch(b)
	return nil
}

// replay asks for what is missing. Where that fails the gap shows with the next batch.
func (s *Subscriber) replay(ctx context.Context) {
	if s.cfg.Replay == "" {
		return
	}
	if err := s.ask(ctx); err != nil && ctx.Err() == nil {
		s.cfg.Log.Info("KV events: what is missing is not told again", "address", s.cfg.Replay, "err", err)
	}
}

// ask has the ROUTER socket tell again what comes from the next number on. It has a connection of
// its own for that, which is seldom, and no state that could outlive a mistake of either end.
func (s *Subscriber) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, replayTime)
	defer cancel()
	z, end, err := s.dial(ctx, s.cfg.Replay, "DEALER", "ROUTER")
	if err != nil {
		return err
	}
	defer end()
	if err := z.Write(nil, binary.BigEndian.AppendUint64(nil, s.next)); err != nil {
		return err
	}
	for {
		m, err := z.Read()
		if err != nil {
			return err
		}
		if len(m) < 3 || len(m[len(m)-2]) != 8 {
			return errors.New("an answer that is none")
		}
		seq := binary.BigEndian.Uint64(m[len(m)-2])
		if seq == endSeq {
			return nil
		}
		if err := s.take(seq, m[len(m)-1]); err != nil {
			return err
		}
	}
}
