package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
	"github.com/kvmesh/kvmesh/kvcache/lmcache"
)

// ownerFile, in each folder that `kvmesh up` makes for one run, is locked by that run
// as long as it lives. A folder whose lock is free is a dead run's.
const ownerFile = ".owner"

// ownerAge is how old an owner's file must be before another run believes that nobody
// holds it: between making and locking lies a moment.
const ownerAge = 10 * time.Second

// own marks a folder as this run's.
func (m *localMesh) own(dir string) error {
	l, err := supervise.Take(filepath.Join(dir, ownerFile))
	if err != nil {
		return fullError(fmt.Errorf("mark %s as this run's: %w", dir, err), dir, "name another place: TMPDIR, or Mesh.spec.kv.dir for the KV of streams")
	}
	m.owned = append(m.owned, l)
	return nil
}

// leftovers lists the folders of runs that were killed together with what cleans up:
// those of the last run of a state folder, and those of this user in the places where
// runs make them. more are further such places.
func leftovers(e *env, state string, more ...string) []string {
	var out []string
	add := func(dir string, age time.Duration) {
		if dir != "" && !slices.Contains(out, dir) && dead(dir, age) {
			out = append(out, dir)
		}
	}
	if data, err := os.ReadFile(filepath.Join(state, upFile)); err == nil {
		var last runningMesh
		if json.Unmarshal(data, &last) == nil { // what is no longer readable names nothing
			add(last.RunDir, 0)
			add(last.KVDir, 0)
		}
	}
	if temp, _, err := e.tempDir(); err == nil {
		more = append(more, temp)
	}
	for _, parent := range append(more, shmDir) {
		found, _ := filepath.Glob(filepath.Join(parent, "kvmesh-*")) // no place, no leftovers
		for _, dir := range found {
			add(dir, ownerAge)
		}
	}
	return out
}

// dead reports whether a folder was made by a run of this user that has ended, an owner's
// file of at least that age ago.
func dead(dir string, age time.Duration) bool {
	name := regexp.MustCompile(`^kvmesh-(kv-)?[0-9]+$`) // see makeTemp and makeKV
	st, err := os.Lstat(dir)
	if err != nil || !st.IsDir() || !name.MatchString(filepath.Base(dir)) {
		return false
	}
	if owner, ok := st.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
		return false
	}
	lock := filepath.Join(dir, ownerFile)
	if st, err = os.Lstat(lock); err != nil || !st.Mode().IsRegular() || time.Since(st.ModTime()) < age {
		return false
	}
	_, held := supervise.Holder(lock)
	return !held
}

// sweep removes what killed runs left behind.
func (m *localMesh) sweep() {
	for _, dir := range leftovers(m.e, m.stateDir, m.kvParents()...) {
		if err := os.RemoveAll(dir); err != nil {
			m.e.log.Warn("left behind by a killed run, and cannot be removed", "dir", dir, "err", err)
			continue
		}
		m.e.log.Info("removed what a killed run left behind", "dir", dir)
	}
	lmcache.Tidy(shmDir)
}

// kvParents is the place for KV that the policy names, where it names one.
func (m *localMesh) kvParents() []string {
	if dir := m.set.Mesh.KV.Dir; dir != "" && dir != policy.KVOff {
		return []string{dir}
	}
	return nil
}

// ownAgain marks the folders of this run that were made again without it.
func (m *localMesh) ownAgain() error {
	for _, dir := range []string{m.runDir, m.kv.dir} {
		if !isFolder(dir) || !absent(filepath.Join(dir, ownerFile)) {
			continue
		}
		if err := m.own(dir); err != nil {
			return err
		}
	}
	return nil
}
