package main

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// keepEvery is how often a running mesh looks after what it needs. What is missing
// at two looks is made again.
const keepEvery = time.Second

// portless is at how many looks an Envoy may be without its port until it is started
// again.
const portless = 5

// keptFolder, in the run folder, has a second name for each file there: a removed
// socket is still what its process listens on, and needs only its name back.
const keptFolder = ".kept"

// keeper looks after the files of a running mesh. Without it a removed socket or log
// folder would be noticed by nobody until something new connects, or reads the log.
type keeper struct {
	m       *localMesh
	missing map[string]bool // at the last look
	refused int             // looks in a row at which Envoy had no port
}

// keep runs until ctx ends.
func (m *localMesh) keep(ctx context.Context) {
	k := keeper{m: m, missing: map[string]bool{}}
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	for {
		if k.folderGone() {
			m.remake(ctx)
		}
		k.files()
		k.lock()
		k.owner()
		k.logs(ctx)
		if k.gone(filepath.Join(m.stateDir, upFile)) {
			k.told(upFile, m.writeUp())
		}
		k.port(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// gone reports whether a file is missing for the second time in a row.
func (k *keeper) gone(path string) bool {
	missing := absent(path)
	again := missing && k.missing[path]
	k.missing[path] = missing && !again
	return again
}

// absent reports whether nothing has that path.
func absent(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) // a file is where its folder was
}

// isFolder reports whether a path names a folder.
func isFolder(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && st.IsDir()
}

// told logs that something was made again.
func (k *keeper) told(what string, err error) {
	if err != nil {
		k.m.e.log.Error("removed under the running mesh, and cannot be made again", "what", what, "err", err)
		return
	}
	k.m.e.log.Warn("removed under the running mesh, and made again", "what", what)
}

// files keeps a second name of every file and socket of the run folder, and gives
// those back that lost their first.
func (k *keeper) files() {
	kept := filepath.Join(k.m.runDir, keptFolder)
	if absent(k.m.secret) && absent(kept) {
		return // the whole folder is gone
	}
	if err := os.MkdirAll(kept, 0o700); err != nil {
		return // the disk is full
	}
	list, err := os.ReadDir(k.m.runDir)
	if err != nil {
		return
	}
	for _, f := range list {
		if !f.IsDir() && !strings.Contains(f.Name(), ".sock.") { // a socket that is being made, see listenUnix
			remember(filepath.Join(k.m.runDir, f.Name()), filepath.Join(kept, f.Name()))
		}
	}
	if list, err = os.ReadDir(kept); err != nil {
		return
	}
	for _, f := range list {
		first, second := filepath.Join(k.m.runDir, f.Name()), filepath.Join(kept, f.Name())
		if !k.gone(first) {
			continue
		}
		if f.Type()&fs.ModeSocket != 0 && !listens(second) {
			_ = os.Remove(second) // its process ended, and the next one makes its own
			continue
		}
		k.told(first, os.Link(second, first))
	}
}

// remember makes second another name of the file first, if it is not.
func remember(first, second string) {
	a, err := os.Lstat(first)
	if err != nil {
		return
	}
	if b, err := os.Lstat(second); err == nil && os.SameFile(a, b) {
		return
	}
	_ = os.Remove(second)      // of a socket before
	_ = os.Link(first, second) // where the system cannot, nothing is kept
}

// listens reports whether a process accepts connections on a socket.
func listens(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	_ = c.Close() // nothing was said
	return true
}

// lock makes the lock of this folder again: without its file a second mesh would start.
func (k *keeper) lock() {
	if k.m.lock.Holds() {
		return
	}
	path := filepath.Join(k.m.stateDir, lockFile)
	next, err := supervise.Take(path)
	if err == nil {
		_ = k.m.lock.Close() // of a file that is gone
		k.m.lock = next
	}
	if _, held := errors.AsType[*supervise.HeldError](err); held && k.missing[path] {
		return // said already
	}
	k.missing[path] = err != nil
	k.told(path, err)
}

// owner marks the folder of the KV again, which the workers make when somebody removed it.
func (k *keeper) owner() {
	if err := k.m.ownAgain(); err != nil && !k.missing[ownerFile] {
		k.missing[ownerFile] = true
		k.m.e.log.Warn("after SIGKILL of the whole mesh a folder will be left behind", "err", err)
	}
}

// logs makes the folder of the logs again, and has everybody open its file anew.
func (k *keeper) logs(ctx context.Context) {
	envoyLog, access := k.m.logFile("envoy.log"), k.m.logFile("access.log")
	if k.gone(filepath.Dir(access)) {
		k.told(filepath.Dir(access), os.MkdirAll(filepath.Dir(access), 0o700))
	}
	if k.gone(envoyLog) {
		k.told(envoyLog, k.m.envoyLog.Rotate()) // opens it anew
	}
	if k.gone(access) {
		k.told(access, k.m.reopenAccessLog(ctx))
	}
}

// port sees whether Envoy has its port for clients. One that another process took
// while Envoy was away keeps it without a listener for ever; started again, it takes
// the port as soon as it is free.
func (k *keeper) port(ctx context.Context) {
	err := k.m.refused(ctx)
	if err == nil {
		k.refused = 0
		return
	}
	if k.refused++; k.refused == 1 {
		k.m.e.log.Error("clients are not served; Envoy is started again every now and then until it has its port", "err", err)
	}
	if k.refused%portless != 0 {
		return
	}
	if pid := k.m.group.PID("envoy"); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM) // gone already: all the better
	}
}
