package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// runFolder is what must be in the run folder beside the sockets of the parts, and is
// told when the folder was made again.
type runFolder struct {
	files map[string][]byte // by path; set before anything runs
	// complaint is why it could not be made again, "" when it could; the keeper's.
	complaint string

	mu   sync.Mutex
	ctx  context.Context    // guarded by mu; ends when the folder is made again
	done context.CancelFunc // guarded by mu
}

// write puts a file of that name into dir, now and whenever the folder is made again.
func (f *runFolder) write(path string, data []byte) error {
	if f.files == nil {
		f.files = map[string][]byte{}
	}
	f.files[path] = data
	return os.WriteFile(path, data, 0o600)
}

// current returns a context that ends when the folder is made again.
func (f *runFolder) current() context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx == nil {
		f.ctx, f.done = context.WithCancel(context.Background())
	}
	return f.ctx
}

// again ends what works with the folder that is gone.
func (f *runFolder) again() {
	f.current()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done()
	f.ctx = nil
}

// each runs serve until it ends by itself or ctx ends, and anew for each new folder.
func (f *runFolder) each(ctx context.Context, serve func(context.Context)) {
	for ctx.Err() == nil {
		folder := f.current()
		round, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(folder, cancel)
		serve(round)
		stop()
		cancel()
		if folder.Err() == nil {
			return
		}
	}
}

// folderGone reports whether the run folder was removed as a whole. Parts that write
// into it may have made an empty one.
func (k *keeper) folderGone() bool {
	return k.gone(k.m.secret) && absent(filepath.Join(k.m.runDir, keptFolder))
}

// hintRestart is what helps when the run folder cannot be made again.
const hintRestart = "remove what is in its place, or stop this mesh and start it again"

// remakeTime bounds how long one part may take to come back with its sockets.
const remakeTime = 20 * time.Second

// remake makes the run folder again with all that belongs into it. The sockets are their
// processes', so these are started again, one after the other; that ends the answers
// which run.
func (m *localMesh) remake(ctx context.Context) {
	if err := m.refill(); err != nil {
		if err.Error() != m.folder.complaint { // it is tried again every other second
			m.e.log.Error("the run folder was removed under the running mesh, and cannot be made again", "dir", m.runDir, "err", err, "hint", hintRestart)
		}
		m.folder.complaint = err.Error()
		return
	}
	m.folder.complaint = ""
	m.e.log.Error("the run folder was removed under the running mesh; it is made again, which ends the answers that run", "dir", m.runDir)
	client := fleet.NewClient(m.ready().API)
	before, err := client.Workers(ctx)
	if err != nil {
		m.e.log.Warn("drains of workers are lost with the run folder", "err", err)
	}
	m.folder.again() // the sockets of this process
	s := socketsIn(m.runDir)
	err = m.startAgain(ctx, "controlplane", s.xds)
	if err == nil {
		m.restoreDrains(ctx, client, before)
		err = m.startAgain(ctx, partGateway, s.extProc, s.relay)
	}
	if err == nil {
		err = m.startAgain(ctx, partEnvoy, s.egress)
	}
	if ctx.Err() != nil {
		return // it is not needed any more
	}
	if err != nil {
		m.e.log.Error("the run folder is not complete", "dir", m.runDir, "err", err, "hint", hintRestart)
		return
	}
	m.e.log.Warn("removed under the running mesh, and made again", "what", m.runDir)
}

// restoreDrains waits until the new control plane, whose registry was in the folder,
// knows the workers again, and drains those that were drained.
func (m *localMesh) restoreDrains(ctx context.Context, c *fleet.Client, before []fleet.WorkerView) {
	err := m.await(ctx, "the workers", func() error {
		now, err := c.Workers(ctx)
		if err == nil && len(now) < len(before) {
			err = fmt.Errorf("%d of %d are known", len(now), len(before))
		}
		return err
	})
	for _, w := range before {
		if w.Drained {
			err = errors.Join(err, c.Drain(ctx, w.ID, true))
		}
	}
	if err != nil {
		m.e.log.Error("drains may be lost with the run folder; see `kvmesh workers`", "err", err)
	}
}

// refill makes the folder and the files in it. A folder of that name that somebody else
// made is not used.
func (m *localMesh) refill() error {
	if err := os.Mkdir(m.runDir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	st, err := os.Lstat(m.runDir)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return fmt.Errorf("%s is not a folder any more", m.runDir)
	}
	if owner, ok := st.Sys().(*syscall.Stat_t); ok && int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("%s is somebody else's", m.runDir)
	}
	if err := os.Chmod(m.runDir, 0o700); err != nil {
		return err
	}
	if m.kv.dir != "" { // it may be in the run folder
		if err := os.MkdirAll(m.kv.dir, 0o700); err != nil {
			return err
		}
	}
	if err := m.ownAgain(); err != nil {
		return err
	}
	for path, data := range m.folder.files {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
	}
	return os.MkdirAll(filepath.Join(m.runDir, keptFolder), 0o700)
}

// startAgain has a part start again and waits for its sockets.
func (m *localMesh) startAgain(ctx context.Context, part string, sockets ...string) error {
	if pid := m.group.PID(part); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM) // gone already is as good
	}
	return m.await(ctx, "the sockets of "+part, func() error {
		for _, path := range sockets {
			if !listens(path) {
				return fmt.Errorf("nobody listens on %s", path)
			}
		}
		return nil
	})
}

// await polls until ok returns nil.
func (m *localMesh) await(ctx context.Context, what string, ok func() error) error {
	ctx, cancel := context.WithTimeout(ctx, remakeTime)
	defer cancel()
	for {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, err)
		case <-time.After(pollEvery):
		}
	}
}
