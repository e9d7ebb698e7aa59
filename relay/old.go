package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// A gateway that was replaced carries answers for minutes, and operators speak to the one
// that took over. So that one asks those before it, each on its socket:
//
//	old ◀── GET /v1/streams, POST /v1/streams/{id}/migrate ── new    when it is asked the same itself
//	old ── POST lastWordPath: fleet.StreamList, sealed ──▶ new       the old one ends, with what it has counted
//
// Each old one speaks only for itself, and for those whose last word it has: so none is
// asked in a circle, and what is counted is counted once.
const (
	lastWordPath = "/kvmesh/streams/last"
	lastWordTime = 2 * time.Second  // to say it
	listTime     = time.Second      // for the list of one old gateway
	oldSilence   = 10 * time.Second // for so long one that did not answer is not asked for its list
	wordKept     = time.Minute      // what one that has ended counted is told for so long
	mostListed   = 64 << 20         // bytes of a list
)

// predecessors is what is known of the gateways before this one. Safe for concurrent use.
type predecessors struct {
	limit time.Duration // for the list of one; listTime

	mu     sync.Mutex
	silent map[string]time.Time // sockets of those that do not answer, with when to ask again
	words  []lastWord           // the latest last
}

// lastWord is what a gateway had counted when it ended.
type lastWord struct {
	until    time.Time
	gateways []string
	attempts []fleet.AttemptView
}

// tell adds the last words to a list.
func (p *predecessors) tell(now time.Time, to *fleet.StreamList) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.words = slices.DeleteFunc(p.words, func(w lastWord) bool { return now.After(w.until) })
	for _, w := range p.words {
		merge(to, fleet.StreamList{Gateways: w.gateways, Attempts: w.attempts})
	}
}

// hear takes a last word in.
func (p *predecessors) hear(w lastWord) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.words = append(p.words, w)
}

// isSilent reports whether a socket should not be asked now.
func (p *predecessors) isSilent(socket string, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.Before(p.silent[socket])
}

// silence notes that nobody has answered on a socket.
func (p *predecessors) silence(socket string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent == nil {
		p.silent = map[string]time.Time{}
	}
	for s, until := range p.silent {
		if now.After(until) {
			delete(p.silent, s)
		}
	}
	p.silent[socket] = now.Add(oldSilence)
}

// merge adds to a list what it has not. A stream on its way from one gateway to the next
// is listed once.
func merge(to *fleet.StreamList, l fleet.StreamList) {
	have := map[string]bool{}
	for _, s := range to.Streams {
		have[s.ID] = s.ID != ""
	}
	for _, s := range l.Streams {
		if !have[s.ID] {
			to.Streams = append(to.Streams, s)
		}
	}
	known := slices.Clone(to.Gateways)
	for _, g := range l.Gateways {
		if !slices.Contains(known, g) {
			to.Gateways = append(to.Gateways, g)
		}
	}
	for _, a := range l.Attempts {
		if !slices.Contains(known, a.Gateway) {
			to.Attempts = append(to.Attempts, a)
		}
	}
}

// list is what this gateway and those before it carry. The others are asked first: what
// they hand over meanwhile is here by then.
func (r *Relay) list(ctx context.Context) fleet.StreamList {
	heard, _ := r.askOldOnes(ctx)
	out := r.own(ctx)
	for _, o := range heard {
		since := time.Since(o.at).Seconds()
		for i := range o.list.Streams {
			o.list.Streams[i].Seconds += since
		}
		merge(&out, o.list)
	}
	oldestFirst(out.Streams)
	return out
}

// migrateAnywhere is migrate for a stream of this gateway or of one before it.
func (r *Relay) migrateAnywhere(ctx context.Context, stream, to string) *openai.Error {
	err := r.migrate(ctx, stream, to)
	if err == nil || err.Status != http.StatusNotFound {
		return err
	}
	heard, all := r.askOldOnes(ctx)
	for _, o := range heard {
		if slices.ContainsFunc(o.list.Streams, func(v fleet.StreamView) bool { return v.ID == stream }) {
			return migrateAt(ctx, o.socket, stream, to)
		}
	}
	err = r.migrate(ctx, stream, to) // it may have been handed over meanwhile
	if err != nil && err.Status == http.StatusNotFound && !all {
		return openai.Unavailable(oldSilence, "No stream of that id runs here, and a gateway that was replaced and may carry it does not answer.")
	}
	return err
}

// oldOne is what a gateway carries that was replaced.
type oldOne struct {
	socket string
	at     time.Time // when it said so
	list   fleet.StreamList
}

// askOldOnes asks the gateways before this one, all at the same time. One that does not
// answer in time is left out, and not waited for again for a while; all is false then.
func (r *Relay) askOldOnes(ctx context.Context) (heard []oldOne, all bool) {
	var asked sync.WaitGroup
	var mu sync.Mutex
	all = true
	ask := func(socket string) {
		asking, cancel := context.WithTimeout(ctx, r.old.limit)
		defer cancel()
		l, err := listOf(asking, socket)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
			heard = append(heard, oldOne{socket, time.Now(), l})
		case forgetDead(socket, err) || ctx.Err() != nil: // it has ended, or nobody wants to know any more
		default:
			all = false
			r.old.silence(socket, time.Now())
			r.cfg.Log.Warn("a gateway that was replaced does not say what it still carries: its streams are not listed", "err", err, "again_in", oldSilence)
		}
	}
	for _, socket := range r.oldSockets() {
		if r.old.isSilent(socket, time.Now()) {
			all = false // nobody else is at it yet
			continue
		}
		asked.Go(func() { ask(socket) })
	}
	asked.Wait()
	return heard, all
}

// oldSockets are those where gateways before this one listen.
func (r *Relay) oldSockets() []string {
	if r.cfg.Socket == "" {
		return nil
	}
	var out []string
	dir, name := filepath.Split(r.cfg.Socket)
	files, _ := os.ReadDir(dir) // where it cannot be read there are none
	for _, f := range files {
		if old, ok := strings.CutPrefix(f.Name(), name+oldSocket); ok && old != r.name {
			out = append(out, dir+f.Name())
		}
	}
	return out
}

// forgetDead reports whether err says that the gateway at a socket has ended, and then
// sees to it that nobody asks there again.
func forgetDead(socket string, err error) bool {
	if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(socket) // it may be removed already
		return true
	}
	return errors.Is(err, os.ErrNotExist)
}

// listOf asks the gateway that listens on a socket what it carries.
func listOf(ctx context.Context, socket string) (l fleet.StreamList, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://gateway/v1/streams", nil)
	if err != nil {
		return l, err
	}
	resp, err := onHost(socket).Do(req)
	if err != nil {
		return l, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return l, fmt.Errorf("status %d", resp.StatusCode) // of a version that could not say it yet
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, mostListed)).Decode(&l); err != nil {
		return l, fmt.Errorf("list of streams: %w", err)
	}
	return l, nil
}

// migrateAt has the gateway that listens on a socket migrate a stream of its own.
func migrateAt(ctx context.Context, socket, stream, to string) *openai.Error {
	ctx, cancel := context.WithTimeout(ctx, handoverTime)
	defer cancel()
	target := url.URL{Scheme: "http", Host: "gateway", Path: "/v1/streams/" + stream + "/migrate", RawQuery: url.Values{"to": {to}}.Encode()}
	target.RawPath = "/v1/streams/" + url.PathEscape(stream) + "/migrate"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target.String(), nil)
	if err != nil {
		return openai.Errorf(http.StatusBadRequest, "The stream's id is none.")
	}
	resp, err := onHost(socket).Do(req)
	if err != nil {
		return openai.Unavailable(time.Second, "The gateway that carries the stream was replaced, and does not answer.")
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNoContent {
		return nil
	}
	var told struct{ Error struct{ Message string } }
	if json.NewDecoder(io.LimitReader(resp.Body, streamWindow)).Decode(&told) != nil || told.Error.Message == "" {
		told.Error.Message = "The gateway that carries the stream gives no reason."
	}
	return openai.Errorf(resp.StatusCode, "%s", told.Error.Message)
}

// lastWord tells the next gateway what this one has counted, for who judges workers by it.
// All answers have ended.
func (r *Relay) lastWord(ctx context.Context) {
	said := r.own(ctx)
	if r.cfg.Secret == "" || len(said.Attempts) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lastWordTime)
	defer cancel()
	if err := r.sealedPost(ctx, r.cfg.Socket, lastWordPath, said); err != nil {
		r.cfg.Log.Debug("the next gateway was not told what this one has counted", "err", err)
	}
}

// hearLastWord takes in what a gateway before this one has counted.
func (r *Relay) hearLastWord(w http.ResponseWriter, in *http.Request) {
	var l fleet.StreamList
	if !r.sealedBody(w, in, &l) {
		return
	}
	r.old.hear(lastWord{time.Now().Add(wordKept), l.Gateways, l.Attempts})
	w.WriteHeader(http.StatusNoContent)
}
