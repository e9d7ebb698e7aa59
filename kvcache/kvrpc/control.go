//go:build unix

package kvrpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// The bounds of messages: a million tokens in a look-up, and as many blocks in its answer.
const (
	mostRequest  = 8 << 20
	mostResponse = 32 << 20
)

// The times after which a connection that says nothing is asked whether it lives, and given
// up. Calls end by themselves; this is for the next ones.
const (
	askAlive   = 10 * time.Second
	waitAlive  = 5 * time.Second
	leastAlive = 5 * time.Second // what a server permits
)

// control makes the gRPC side of a client. It does not connect.
func (d *dialer) control() (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if d.TLS != nil {
		creds = credentials.NewTLS(withProtos(d.TLS, d.host, protoControl))
	}
	retry := backoff.Config{BaseDelay: min(100*time.Millisecond, d.Away), Multiplier: 1.6, Jitter: 0.2, MaxDelay: min(time.Second, d.Away)}
	return grpc.NewClient("passthrough:///"+d.Addr,
		grpc.WithTransportCredentials(creds), grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return d.raw(ctx) }),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: d.DialTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: askAlive, Timeout: waitAlive}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostResponse), grpc.MaxCallSendMsgSize(mostRequest)),
		grpc.WithDisableServiceConfig(),
	)
}

// call does one call of the control channel within the patience of the client.
func (c *Client) call(ctx context.Context, op string, do func(context.Context) error) error {
	ctx, call, err := c.ops.Begin(ctx, op)
	if err != nil {
		return err
	}
	err = controlError(ctx, do(ctx))
	if errors.Is(err, kvcache.ErrStale) {
		c.ops.Count.Stale.Add(1)
	} else if errors.Is(err, kvcache.ErrFull) {
		c.ops.Count.Full.Add(1)
	}
	return call.End(err)
}

// codeOf is how the errors that callers act on are told by gRPC, whose own errors have
// none of these codes.
func codeOf(err error) codes.Code {
	switch {
	case errors.Is(err, kvcache.ErrNotFound), errors.Is(err, errUnknown):
		return codes.NotFound
	case errors.Is(err, kvcache.ErrStale):
		return codes.Aborted
	case errors.Is(err, kvcache.ErrFull):
		return codes.FailedPrecondition
	case errors.Is(err, kvcache.ErrGap):
		return codes.OutOfRange
	case errors.Is(err, errBad):
		return codes.InvalidArgument
	}
	return codes.Unknown
}

// errBad says that a request is not what its operation wants.
var errBad = errors.New("bad request")

// controlStatus is how a server tells an error by gRPC.
func controlStatus(err error) error {
	if err == nil {
		return nil
	}
	if r, ok := errors.AsType[*kvcache.Refusal](err); ok {
		st, derr := grpcstatus.New(codes.DataLoss, "refused").WithDetails(&kvrpcpb.Refusal{Reason: uint32(r.Reason), Detail: cut(r.Detail)})
		if derr == nil {
			return st.Err()
		}
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return grpcstatus.FromContextError(err).Err()
	}
	return grpcstatus.Error(codeOf(err), cut(err.Error()))
}

// controlError is the error that a server told by gRPC.
func controlError(ctx context.Context, err error) error {
	st := grpcstatus.Convert(err)
	switch st.Code() {
	case codes.OK:
		return nil
	case codes.NotFound:
		return errUnknown
	case codes.Aborted:
		return kvcache.ErrStale
	case codes.FailedPrecondition:
		return kvcache.ErrFull
	case codes.OutOfRange:
		return kvcache.ErrGap
	case codes.DataLoss:
		for _, d := range st.Details() {
			if r, ok := d.(*kvrpcpb.Refusal); ok && int(r.Reason) < len(kvcache.Reasons()) {
				return &kvcache.Refusal{Reason: kvcache.Reason(r.Reason), Detail: r.Detail}
			}
		}
	case codes.DeadlineExceeded:
		return fmt.Errorf("%w: %s", context.DeadlineExceeded, st.Message())
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %s", ctx.Err(), st.Message())
	}
	return err
}

// Longest implements kvcache.Store. The peer keeps what it names for a moment.
func (c *Client) Longest(ctx context.Context, q kvcache.Query) (m kvcache.Match, err error) {
	c.ops.Count.Lookups.Add(1)
	err = c.call(ctx, remote.OpLookUp, func(ctx context.Context) error {
		a, err := c.control.Longest(ctx, &kvrpcpb.LongestRequest{Space: spaceTo(q.Space), From: q.From[:], First: uint64(q.First), Ids: q.IDs})
		if err == nil {
			m, err = matchFrom(q.Space, a)
		}
		return err
	})
	if err != nil {
		return kvcache.Match{}, fmt.Errorf("look up: %w", err)
	}
	c.ops.Count.LookupTokens.Add(uint64(m.Tokens() + m.Common))
	return m, nil
}

// opRefused is the name of the call that tells of a wrong block.
const opRefused = "refused"

// tellRefused tells the peer of a block that came wrong, and says whether it was wrong there.
func (c *Client) tellRefused(ctx context.Context, ref kvcache.Ref) (wrong bool, err error) {
	err = c.call(ctx, opRefused, func(ctx context.Context) error {
		a, err := c.control.Refused(ctx, &kvrpcpb.RefusedRequest{Space: spaceTo(ref.Space), Parent: ref.Parent[:], Key: ref.Key[:]})
		wrong = a.GetWrong()
		return err
	})
	return wrong, err
}

// Drop implements kvcache.Store.
func (c *Client) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	return c.call(ctx, remote.OpDrop, func(ctx context.Context) error {
		_, err := c.control.Drop(ctx, &kvrpcpb.DropRequest{Fingerprint: f[:]})
		return err
	})
}

// Label implements kvcache.Labeled.
func (c *Client) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	return c.call(ctx, "label", func(ctx context.Context) error {
		_, err := c.control.Label(ctx, &kvrpcpb.LabelRequest{Fingerprint: f[:], Model: strings.ToValidUTF8(l.Model, "?"), Text: strings.ToValidUTF8(l.Text, "?")})
		return err
	})
}

// PeerStats are the counters of the peer's store, of all who use it.
func (c *Client) PeerStats(ctx context.Context) (st kvcache.Stats, err error) {
	err = c.call(ctx, "stats", func(ctx context.Context) (err error) {
		st, _, err = c.peerStats(ctx)
		return err
	})
	return st, err
}

// mostMemoryID bounds the name of a peer's memory, in bytes.
const mostMemoryID = 64

// Probe asks the peer whether it is there, and for the name of its memory: with another one
// than before, what was put there is gone. "" = the peer does not tell. A failure does not
// count, so that nobody's call is held back for it; an answer does, so that none is any more.
func (c *Client) Probe(ctx context.Context) (memory string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	st, id, err := c.peerStats(ctx)
	if err != nil {
		return "", fmt.Errorf("%s: probe: %w", c.cfg.Name, controlError(ctx, err))
	}
	c.ops.Answered()
	c.mu.Lock()
	c.last = st
	c.mu.Unlock()
	return string(id[:min(len(id), mostMemoryID)]), nil
}

// peerStats asks for them, and for the name of the peer's memory.
func (c *Client) peerStats(ctx context.Context) (st kvcache.Stats, memory []byte, err error) {
	a, err := c.control.Stats(ctx, &kvrpcpb.StatsRequest{})
	if err == nil {
		err = json.Unmarshal(a.Stats, &st)
	}
	return st, a.GetMemory(), err
}

// statsTime bounds how long the peer is asked for its counters.
const statsTime = 250 * time.Millisecond

// Stats implements kvcache.Counted. What the peer alone knows (room, evictions, refusals)
// is of all who use its store, since it started; while it is away it is what it said last.
func (c *Client) Stats() kvcache.Stats {
	ctx, cancel := context.WithTimeout(context.Background(), min(statsTime, c.cfg.Timeout))
	defer cancel()
	// A scrape says nothing about the peer: it is neither counted nor held back.
	peer, _, err := c.peerStats(ctx)
	c.mu.Lock()
	if err == nil {
		c.last = peer
	}
	peer = c.last
	c.mu.Unlock()
	st := c.ops.Count.Stats()
	st.Evictions, st.EvictedBytes, st.Expired, st.Swept = peer.Evictions, peer.EvictedBytes, peer.Expired, peer.Swept
	st.Used, st.Limit = peer.Used, peer.Limit
	for i := range st.Refused {
		st.Refused[i] += peer.Refused[i]
	}
	return st
}

// The forms that values have in messages. What comes in is checked here, once.

func spaceTo(s kvcache.Space) *kvrpcpb.Space {
	return &kvrpcpb.Space{Fingerprint: s.Fingerprint[:], Root: s.Root[:]}
}

func spaceFrom(p *kvrpcpb.Space) (s kvcache.Space, err error) {
	f, err1 := keyFrom(p.GetFingerprint())
	r, err2 := keyFrom(p.GetRoot())
	return kvcache.Space{Fingerprint: kvcache.Fingerprint(f), Root: r}, errors.Join(err1, err2)
}

func keyFrom(b []byte) (k kvcache.Key, err error) {
	if len(b) != len(k) {
		return k, fmt.Errorf("%w: a key of %d bytes", errBad, len(b))
	}
	return kvcache.Key(b), nil
}

// countFrom reads a number that is not negative.
func countFrom(n uint64) (int, error) {
	if int(n) < 0 {
		return 0, fmt.Errorf("%w: number %d", errBad, n)
	}
	return int(n), nil
}

func matchTo(m kvcache.Match) *kvrpcpb.LongestResponse {
	a := &kvrpcpb.LongestResponse{Common: uint32(m.Common)}
	for i := range m.Blocks {
		a.Blocks = append(a.Blocks, foundTo(&m.Blocks[i]))
	}
	if m.Common > 0 {
		a.Partial = foundTo(&m.Partial)
	}
	return a
}

func foundTo(f *kvcache.Found) *kvrpcpb.Found {
	return &kvrpcpb.Found{Parent: f.Parent[:], Key: f.Key[:], First: uint64(f.First), Tokens: uint32(f.Tokens), Size: uint64(f.Size)}
}

func matchFrom(space kvcache.Space, a *kvrpcpb.LongestResponse) (m kvcache.Match, err error) {
	for _, p := range a.Blocks {
		f, err := foundFrom(space, p)
		if err != nil {
			return kvcache.Match{}, err
		}
		m.Blocks = append(m.Blocks, f)
	}
	if m.Common = int(a.Common); m.Common > 0 {
		m.Partial, err = foundFrom(space, a.Partial)
	}
	return m, err
}

func foundFrom(space kvcache.Space, p *kvrpcpb.Found) (f kvcache.Found, err error) {
	parent, err1 := keyFrom(p.GetParent())
	key, err2 := keyFrom(p.GetKey())
	first, err3 := countFrom(p.GetFirst())
	size, err4 := countFrom(p.GetSize())
	return kvcache.Found{
		Ref:   kvcache.Ref{Space: space, Parent: parent, Key: key},
		First: first, Tokens: int(p.GetTokens()), Size: int64(size),
	}, errors.Join(err1, err2, err3, err4)
}
