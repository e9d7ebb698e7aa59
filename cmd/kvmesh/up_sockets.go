package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// makeRun makes the run folder: the one that the policy names, else a new one among the
// temporary files, where the paths of sockets are short.
func (m *localMesh) makeRun() (string, error) {
	dir := m.set.Mesh.Listen.Sockets
	if dir == "" {
		return m.e.makeTemp("kvmesh-")
	}
	lock, err := claimFolder(dir)
	if err != nil {
		return "", withHint(fmt.Errorf("listen.sockets: %w", err), "name a folder that is empty or not there, in one that exists and is writable")
	}
	m.owned = append(m.owned, lock)
	return dir, nil
}

// claimFolder makes a folder that only this user can enter, or takes an empty one of this
// user, or what a killed run left there, and marks it as this run's. At the end all of it
// is removed, so nothing else may be in it.
func claimFolder(dir string) (*supervise.Lock, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return nil, err
	}
	if owner, ok := st.Sys().(*syscall.Stat_t); !st.IsDir() || !ok || int(owner.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s is no folder of this user", dir)
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	dead := slices.ContainsFunc(list, func(f os.DirEntry) bool { return f.Name() == ownerFile }) // or alive: then it is locked
	if len(list) > 0 && !dead {
		return nil, fmt.Errorf("%s is not empty: %s is in it", dir, list[0].Name())
	}
	lock, err := supervise.Take(filepath.Join(dir, ownerFile))
	if h, ok := errors.AsType[*supervise.HeldError](err); ok {
		return nil, fmt.Errorf("%s is in use by process %d", dir, h.PID)
	}
	if err != nil {
		return nil, err
	}
	err = os.Chmod(dir, 0o700)
	for _, f := range list {
		if f.Name() != ownerFile {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
		}
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}
