package main

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// shmDir is memory that processes of one host share, where there is such a folder.
const shmDir = "/dev/shm"

// leastKV is the room below which KV goes to the disk: a few long streams of the
// small model.
const leastKV = 64 << 20

// makeKV makes the folder in which the local workers keep the KV of their streams,
// where the policy wants one, and has the reaper remove it. Without Mesh.kv.dir it is
// in shared memory, else beside the sockets.
func (m *localMesh) makeKV() error {
	kv := m.set.Mesh.KV
	m.kv.limit = int64(kv.Limit)
	if kv.Dir == policy.KVOff || len(m.workers) == 0 && kv.LMCache.Listen == "" {
		return nil
	}
	parent := kv.Dir
	if parent == "" {
		var err error
		if parent, err = m.kvParent(freeBytes(shmDir)); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(parent, "kvmesh-kv-") // only this user can enter it
	if err != nil {
		return fullError(fmt.Errorf("folder for the KV of streams: %w", err), parent, "set Mesh.spec.kv.dir to a folder that can be written, or to off")
	}
	m.kv.dir = filepath.Clean(dir)
	m.reaper.RemoveDir(m.kv.dir)
	return m.own(m.kv.dir)
}

// kvParent is where the KV goes that the policy gives no folder: shared memory, if so much
// is free in it, else beside the sockets, where engines do not find it. It bounds the KV.
func (m *localMesh) kvParent(free int64, err error) (string, error) {
	switch small := err != nil || free < 2*leastKV; {
	case small && m.set.Mesh.KV.LMCache.Listen != "":
		return "", withHint(fmt.Errorf("kv.lmcache: engines open KV in %s only, which is missing or small: %d MiB are free there, at least %d are needed", shmDir, free>>20, 2*leastKV>>20),
			"give it room (docker run --shm-size=1g; else mount -o remount,size=1g "+shmDir+"), or take kv.lmcache out of the policy")
	case small:
		m.e.log.Info("KV of streams is kept on disk: shared memory is missing or small", "dir", m.runDir, "free_bytes", free)
		return m.runDir, nil
	case free/2 < m.kv.limit:
		m.kv.limit = free / 2 // the rest is others'
		m.e.log.Info("KV of streams is limited to half of the free shared memory", "bytes", m.kv.limit)
	}
	return shmDir, nil
}

// freeBytes is the room that a file system has for this user.
func freeBytes(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, err
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}

// writeSecret writes the secret by which workers know the relay: KVMESH_RELAY_SECRET,
// which several meshes can have in common, else one for this run.
func (m *localMesh) writeSecret() error {
	m.secret = filepath.Join(m.runDir, "relay.secret")
	if err := m.folder.write(m.secret, []byte(cmp.Or(m.e.getenv("KVMESH_RELAY_SECRET"), rand.Text())+"\n")); err != nil {
		return fmt.Errorf("write the relay's secret: %w", err)
	}
	return nil
}
