package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// When a gateway is replaced on its host, what clients may come back for goes to the new
// one, by the relay's socket, which is the new one's by then:
//
//	old ── POST handoverPath: passedOn, sealed ──▶ new    clients that are away, at once;
//	                                                      the others when they leave, or when the time is over
//	old ◀── POST askPath: wanted, sealed ── new           a client has come, and its stream has not
//
// The old one listens for that on a socket of its own, beside the relay's. There it also
// shows and steers what it carries (old.go).
const (
	handoverPath = "/kvmesh/streams"
	askPath      = "/kvmesh/streams/ask"
	handoverTime = 5 * time.Second // for one stream
	oldSocket    = ".old."         // between the relay's socket and the name of a gateway
)

// passedOn is a stream on its way to the next gateway.
type passedOn struct {
	Head   recordHead `json:"head"`
	Frames []frame    `json:"frames"`
	Sent   int        `json:"sent"` // events that a client was sent
	Gen    string     `json:"gen"`  // whose it is in the shared store, "" for not there
}

// wanted is what a client comes back to.
type wanted struct {
	Stream string `json:"stream"`
	Owner  []byte `json:"owner"`
	N      int    `json:"n"`
}

// Replaced tells the relay, before Run's context ends, that another gateway has taken its
// socket over: that one may see and steer what this one carries from now on, and gets what
// clients may come back for. It does nothing without Config.Socket; without Config.Secret
// nothing is handed over.
func (r *Relay) Replaced() error {
	if r.cfg.Socket == "" {
		return nil
	}
	path := r.cfg.Socket + oldSocket + r.name
	lis, err := listenPrivate(path, r.cfg.Socket+".new."+r.name)
	if err != nil {
		return fmt.Errorf("listen for the gateway that took over: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+askPath, r.answerAsked)
	mux.Handle("/v1/", streamsHandler(r.own, r.migrate))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout}
	go func() { _ = srv.Serve(lis) }() // until closeOld
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	if r.cfg.Secret != "" {
		r.kept.give = r.handOver
	}
	r.kept.closeOld = func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Shutdown(ctx) // who still asks is told nothing
		_ = os.Remove(path)   // it may be gone with the whole folder
	}
	return nil
}

// listenPrivate listens on a socket that only this user may use. It gets its path once it
// listens: whoever finds it there and is refused knows that its process is gone. By then
// it is the one at mine, which is nobody else's.
func listenPrivate(path, mine string) (net.Listener, error) {
	lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: mine, Net: "unix"})
	if err != nil {
		return nil, err
	}
	lis.SetUnlinkOnClose(false) // it is called otherwise by then
	err = os.Chmod(mine, 0o600)
	if err == nil {
		err = os.Rename(mine, path)
	}
	if err != nil {
		_, _ = lis.Close(), os.Remove(mine) // the error to report is the one before
		return nil, err
	}
	return lis, nil
}

// giveLocked begins to hand a stream over to the next gateway. It is silent from now on:
// its job ends, and what it would say goes on there.
func (k *retained) giveLocked(s *keptStream) {
	if s.given != nil {
		return
	}
	s.given = make(chan struct{})
	gen := ""
	if s.share != nil && !s.share.off {
		gen = s.share.gen
	}
	k.shared.forgetLocked(s, false)
	k.backLocked(s)
	s.cancel()
	s.poke()
	k.running.Go(func() {
		defer close(s.given)
		<-s.done
		s.pack()
		err := k.give(s, gen)
		k.mu.Lock()
		defer k.mu.Unlock()
		if s.gone {
			return
		}
		reason := ""
		if err != nil {
			reason = droppedStopped
		} else {
			k.gauge.passed.WithLabelValues(byRestart, passedAway).Inc()
		}
		s.failed = openai.Unavailable(time.Second, "The gateway is stopping. Please come back to the stream.")
		k.dropLocked(s, reason)
	})
}

// giveAll hands over what is left.
func (k *retained) giveAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.give == nil {
		return
	}
	for _, s := range k.streams {
		k.giveLocked(s)
	}
}

// pack makes what the next gateway gets of a stream, unless that is made. The job is at
// its end: the pen is nobody's.
func (s *keptStream) pack() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.given == nil || s.packed != nil || !s.streams() || len(s.events) == 0 {
		return
	}
	p := &passedOn{Head: *s.record(), Sent: s.sent}
	for i, e := range s.events {
		p.Frames = append(p.Frames, frame{N: s.first + i, Event: e, Last: s.first+i == s.numbered})
	}
	last := &p.Frames[len(p.Frames)-1]
	if last.Last {
		p.Head.Body = nil // nobody asks a worker again
	} else {
		last.Gain = s.steps.next(s.job, true)
	}
	s.packed = p
}

// errNothing says that nobody can go on with a stream.
var errNothing = errors.New("no part of it was delivered yet")

// handOver sends a stream whose job is over to the next gateway.
func (r *Relay) handOver(s *keptStream, gen string) error {
	if s.packed == nil {
		return errNothing
	}
	s.packed.Gen = gen
	ctx, cancel := context.WithTimeout(context.Background(), handoverTime)
	defer cancel()
	err := r.sealedPost(ctx, r.cfg.Socket, handoverPath, s.packed)
	s.packed = nil
	if err != nil {
		r.cfg.Log.Warn("a stream could not be handed over", "err", err)
	}
	return err
}

// onHost speaks to the gateway that listens on a socket.
func onHost(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
}

// sealedPost sends v to a gateway on this host.
func (r *Relay) sealedPost(ctx context.Context, socket, path string, v any) error {
	body, err := r.seal.seal(path, v)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://gateway"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := onHost(socket).Do(req)
	if err != nil {
		return fmt.Errorf("another gateway on this host: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("another gateway on this host: status %d", resp.StatusCode)
	}
	return nil
}

// sealedBody reads what sealedPost sent, and answers where that is not possible.
func (r *Relay) sealedBody(w http.ResponseWriter, in *http.Request, v any) bool {
	most := 2*int64(r.cfg.Policy.Mesh.MaxBody) + 2*int64(r.cfg.Policy.Mesh.HeldStreams) // as JSON it is larger
	body, err := io.ReadAll(io.LimitReader(in.Body, most))
	if err != nil || r.cfg.Secret == "" || r.seal.open(in.URL.Path, body, v) != nil {
		w.WriteHeader(http.StatusForbidden)
		return false
	}
	return true
}

// takeOver takes in what the gateway before this one hands over.
func (r *Relay) takeOver(w http.ResponseWriter, in *http.Request) {
	var p passedOn
	if !r.sealedBody(w, in, &p) {
		return
	}
	if r.kept.has(p.Head.Stream) { // its client has been faster, by the shared store
		w.WriteHeader(http.StatusConflict)
		return
	}
	h, err := r.claimed(in.Context(), &p)
	if err == nil {
		err = r.adopt(&record{p.Head, p.Frames}, h, p.Sent)
	}
	if err != nil {
		r.cfg.Log.Warn("a stream could not be taken over", "err", err)
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	}
	r.kept.gauge.passed.WithLabelValues(byRestart, passedHere).Inc()
	w.WriteHeader(http.StatusNoContent)
}

// claimed takes a stream that is handed over, in the shared store, too, where it is told
// anew. Where that fails it is not shared any more.
func (r *Relay) claimed(ctx context.Context, p *passedOn) (*sharing, error) {
	h := r.kept.shared.newSharing(p.Head.Stream)
	if h == nil || p.Gen == "" {
		return h, nil
	}
	got, err := r.kept.shared.store.claim(ctx, h.key, p.Gen, h.gen)
	switch {
	case err != nil:
		h.off = true
	case len(got) == 0:
		if _, _, _, ok, err := r.kept.shared.store.peek(ctx, h.key); err == nil && ok {
			return nil, fmt.Errorf("%w: another gateway has it by the shared store", errAbsent)
		}
	}
	return h, nil
}

// has reports whether a stream is here.
func (k *retained) has(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.streams[id] != nil
}

// askOld asks the gateways before this one for a stream whose client has come here, and
// reports whether one has handed it over.
func (r *Relay) askOld(ctx context.Context, id string, n int, who owner) bool {
	if r.cfg.Secret == "" {
		return false
	}
	return slices.ContainsFunc(r.oldSockets(), func(socket string) bool {
		ctx, cancel := context.WithTimeout(ctx, handoverTime)
		defer cancel()
		err := r.sealedPost(ctx, socket, askPath, wanted{id, who[:], n})
		forgetDead(socket, err)
		return err == nil
	})
}

// answerAsked hands a stream over that the next gateway asks for, and says when it has it.
func (r *Relay) answerAsked(w http.ResponseWriter, in *http.Request) {
	var q wanted
	if !r.sealedBody(w, in, &q) {
		return
	}
	k := r.kept
	k.mu.Lock()
	s := k.streams[q.Stream]
	if s == nil || len(q.Owner) != len(owner{}) || !s.hasLocked(owner(q.Owner), q.N) {
		k.mu.Unlock()
		w.WriteHeader(http.StatusNotFound)
		return
	}
	if s.at != nil {
		s.at.replaceLocked()
	}
	k.giveLocked(s)
	k.mu.Unlock()
	select {
	case <-s.given:
		w.WriteHeader(http.StatusNoContent)
	case <-in.Context().Done():
	}
}
