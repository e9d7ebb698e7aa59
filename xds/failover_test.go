package xds_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/xds"
)

// An Envoy that starts while every control plane is dead gets the last
// configuration from the snapshot, and goes back to the control plane.
func TestSnapshotWhileControlPlaneIsDead(t *testing.T) {
	envoytest.Binary(t)
	p := newPlane(t, onePool)
	snapshot := filepath.Join(p.config.StateDir, "snapshot.sock")
	serveSnapshot(t, p, snapshot)
	w := startWorker(t, "w0")
	p.register(w)
	p.wants("w0", "at weight 200", func(v fleet.WorkerView) bool { return v.Weight == 200 })
	// The file follows within a second.
	first := p.startEnvoy(snapshot)
	first.host("w0", "at weight 200", func(h admin.Host) bool { return h.Weight == 200 })
	w.load(1)
	first.host("w0", "at weight 100", func(h admin.Host) bool { return h.Weight == 100 })
	if n := first.stat("cluster.xds_snapshot.upstream_cx_total"); n != 0 {
		t.Errorf("the snapshot was asked %d times with the control plane up", n)
	}
	<-time.After(1200 * time.Millisecond)
	p.stop()
	first.process.Kill()

	e := p.startEnvoy(snapshot)
	e.host("w0", "at weight 100", func(h admin.Host) bool { return h.Weight == 100 && h.EDSHealth == "HEALTHY" })
	if n := e.stat("cluster.xds_snapshot.upstream_cx_total"); n == 0 {
		t.Error("the configuration came from nowhere")
	}

	p.start()
	w.load(0.25)
	e.host("w0", "at weight 400", func(h admin.Host) bool { return h.Weight == 400 })
	if n := e.stat("cluster_manager.cluster_removed"); n != 0 {
		t.Errorf("%d clusters were removed on the way", n)
	}
}

// Without a snapshot nothing is answered: an empty answer would be a
// configuration.
func TestNoSnapshotNoAnswer(t *testing.T) {
	p := newPlane(t, onePool)
	p.stop()
	p.config.StateDir = t.TempDir() // where nobody wrote
	snapshot := filepath.Join(envoytest.Dir(t), "snapshot.sock")
	serveSnapshot(t, p, snapshot)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := fleet.Watch(ctx, fleet.WatchConfig{Target: "unix:" + snapshot, Node: "g"}, noWorkers(t))
	if ctx.Err() == nil {
		t.Errorf("Watch ended early: %v", err)
	}
}

func serveSnapshot(t *testing.T, p *plane, path string) {
	t.Helper()
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	c := xds.SnapshotConfig{
		Path: xds.SnapshotPath(p.config.StateDir), Listener: ln, Primary: p.config.ListenXDS,
	}
	go func() {
		defer close(done)
		if err := xds.ServeSnapshot(ctx, c); ctx.Err() == nil {
			t.Errorf("ServeSnapshot: %v", err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}
