package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// controlSocket is where `kvmesh up` takes orders from this user.
const controlSocket = "up.sock"

// serveControl takes orders until ctx ends.
func (m *localMesh) serveControl(ctx context.Context) { m.folder.each(ctx, m.takeOrders) }

// takeOrders takes them in the present run folder.
func (m *localMesh) takeOrders(ctx context.Context) {
	l, err := listenUnix(filepath.Join(m.runDir, controlSocket))
	if err != nil {
		m.e.log.Error("`kvmesh restart` does not work", "err", err)
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /restart/{part}", func(w http.ResponseWriter, r *http.Request) {
		handover, err := time.ParseDuration(r.URL.Query().Get("handover"))
		if err != nil || handover < time.Second {
			openai.Invalid("handover", "Want a duration of at least a second.").Write(w)
			return
		}
		if err := m.replace(r.Context(), r.PathValue("part"), handover); err != nil {
			openai.Errorf(http.StatusServiceUnavailable, "%v", err).Write(w)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })() // an order that late has no effect
	if err := srv.Serve(l); ctx.Err() == nil {
		m.e.log.Error("`kvmesh restart` does not work any more", "err", err)
	}
}

// Parts that can be replaced while they work.
const (
	partGateway = "gateway"
	partEnvoy   = "envoy"
)

// replace has a new process of a part take over; the old one carries what it has to
// the end, for as long as handover.
func (m *localMesh) replace(ctx context.Context, part string, handover time.Duration) error {
	switch part {
	case partGateway:
		return m.group.Replace(ctx, part, supervise.Handover{
			Ready: m.gatewayTookOver,
			Retire: func(ctx context.Context, pid int) {
				_ = syscall.Kill(pid, syscall.SIGUSR2) // gone already is as good
				select {
				case <-ctx.Done(): // it is gone, or everything ends
				case <-time.After(handover):
				}
			},
			Grace: graceGateway,
		})
	case partEnvoy:
		return m.replaceEnvoy(ctx, handover)
	}
	return fmt.Errorf("there is no part %q to restart: want %s or %s", part, partGateway, partEnvoy)
}

// gatewayTookOver reports whether the process of that pid owns the gateway's sockets.
func (m *localMesh) gatewayTookOver(ctx context.Context, pid int) bool {
	s := socketsIn(m.runDir)
	for _, path := range []string{s.relay, s.extProc} {
		if owner, err := socketOwner(ctx, path); err != nil || owner != pid {
			return false
		}
	}
	return true
}

// hotRestart holds what two Envoys that follow each other share: a number, by which
// the new one finds the old one's listening sockets, and a count. Safe for concurrent
// use.
type hotRestart struct {
	reaper *supervise.Reaper

	mu       sync.Mutex
	handover time.Duration // for which an old one carries its answers
	old      bool          // one that was replaced still carries answers
	next     bool          // the next start takes over from the running one
	base     uint32
	epoch    int
}

// args are the arguments of the next start. A cold one begins with a number of its
// own, since an old process that still finishes holds the last one.
func (h *hotRestart) args() []string {
	if runtime.GOOS != "linux" {
		return []string{"--disable-hot-restart"}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.next {
		h.epoch++
	} else {
		h.base, h.epoch = 1+rand.Uint32N(1<<28), 0
		// Envoy leaves its shared memory behind, named by ten times the number.
		h.reaper.RemoveDir(filepath.Join(shmDir, "envoy_shared_memory_"+strconv.FormatUint(10*uint64(h.base), 10)))
	}
	h.next = false
	return []string{
		"--base-id", strconv.FormatUint(uint64(h.base), 10), "--restart-epoch", strconv.Itoa(h.epoch),
		// The old one tells its clients at once to connect anew. The new one ends it, and
		// nobody else may: an Envoy whose parent is gone when it speaks to it aborts.
		"--drain-strategy", "immediate", "--drain-time-s", "1", "--skip-hot-restart-parent-stats",
		"--parent-shutdown-time-s", strconv.Itoa(max(2, int(h.handover.Seconds()))),
	}
}

// errTooSoon refuses a second replacement: a third Envoy would end the first at once.
var errTooSoon = errors.New("the Envoy that was replaced last still carries answers, and another one now would cut them: try again when it has ended")

// takeOver makes the next start one that takes over, and returns its count.
func (h *hotRestart) takeOver(handover time.Duration) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.old || h.next {
		return 0, errTooSoon
	}
	h.next, h.old, h.handover = true, true, handover
	return h.epoch + 1, nil
}

// gone notes that the one that was replaced has ended.
func (h *hotRestart) gone() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.old = false
}

// failed takes back what takeOver changed: the old one goes on.
func (h *hotRestart) failed(epoch int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next, h.old, h.epoch = false, false, epoch-1
}

// replaceEnvoy hands the listening sockets over to a new Envoy.
func (m *localMesh) replaceEnvoy(ctx context.Context, handover time.Duration) error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("envoy hands its sockets over on Linux only")
	}
	if !m.ownEnvoy(ctx) {
		return fmt.Errorf("envoy is not ready: it can be replaced once it is")
	}
	epoch, err := m.hot.takeOver(handover)
	if err != nil {
		return err
	}
	err = m.group.Replace(ctx, partEnvoy, supervise.Handover{
		Ready: func(ctx context.Context, _ int) bool {
			info, err := admin.NewClient(m.ready().Admin).ServerInfo(ctx)
			return err == nil && info.State == "LIVE" && info.Options.RestartEpoch == epoch && m.edgeListens(ctx)
		},
		Retire: retired(handover, m.hot.gone),
		Grace:  graceEnvoy,
	})
	if err != nil {
		m.hot.failed(epoch)
	}
	return err
}

// outlived is how much longer than its time an old process may take to end by itself.
const outlived = 10 * time.Second

// retired returns a Retire that waits for the old process to end by itself.
func retired(after time.Duration, then func()) func(context.Context, int) {
	return func(ctx context.Context, _ int) {
		defer then()
		select {
		case <-ctx.Done(): // it is gone, or everything ends
		case <-time.After(after + outlived):
		}
	}
}
