package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/supervise"
	"github.com/kvmesh/kvmesh/xds"
)

// sockets are the Unix sockets of one mesh, by convention inside its run folder.
type sockets struct {
	xds, snapshot, extProc, relay, egress string
}

func socketsIn(dir string) sockets {
	at := func(name string) string { return filepath.Join(dir, name) }
	return sockets{at("xds.sock"), at("xds-snapshot.sock"), at("ext_proc.sock"), at("relay.sock"), at("egress.sock")}
}

// cpStateDir is where the control plane keeps its state and snapshot by default.
func cpStateDir(runDir string) string { return filepath.Join(runDir, "controlplane") }

// serveSnapshot serves the control plane's last snapshot to an Envoy that starts
// while no control plane is up.
func (m *localMesh) serveSnapshot(ctx context.Context) { m.folder.each(ctx, m.serveOneSnapshot) }

// serveOneSnapshot serves it in the present run folder.
func (m *localMesh) serveOneSnapshot(ctx context.Context) {
	s := socketsIn(m.runDir)
	l, err := listenUnix(s.snapshot)
	if err != nil {
		m.e.log.Error("xDS snapshot is not served", "err", err)
		return
	}
	err = xds.ServeSnapshot(ctx, xds.SnapshotConfig{
		Path: xds.SnapshotPath(cpStateDir(m.runDir)), Listener: l, Primary: s.xds, Log: m.e.log.With("part", "snapshot"),
	})
	if err != nil && ctx.Err() == nil {
		m.e.log.Error("xDS snapshot is not served", "err", err)
	}
}

// Access log rotation: Envoy opens the file again when told to.
const (
	accessLogMost  = 64 << 20
	accessLogCheck = 30 * time.Second
)

func (m *localMesh) rotateAccessLog(ctx context.Context) {
	tick := time.NewTicker(accessLogCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		name := m.logFile("access.log")
		if st, err := os.Stat(name); err != nil || st.Size() < accessLogMost {
			continue
		}
		if err := os.Rename(name, name+".1"); err != nil {
			m.e.log.Warn("rotate access log", "err", err)
			continue
		}
		if err := m.reopenAccessLog(ctx); err != nil {
			m.e.log.Warn("rotate access log", "err", err)
		}
	}
}

// makeAccessLog makes the access log, which Envoy would make readable for everybody.
func (m *localMesh) makeAccessLog() error {
	f, err := os.OpenFile(m.logFile("access.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Chmod(0o600) // one of an earlier version
}

// reopenAccessLog has Envoy open a new access log.
func (m *localMesh) reopenAccessLog(ctx context.Context) error {
	if err := m.makeAccessLog(); err != nil {
		return err
	}
	return m.reopenLogs(ctx)
}

// reopenLogs has Envoy open its access log by its name again.
func (m *localMesh) reopenLogs(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.ready().Admin+"/reopen_logs", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	_ = resp.Body.Close() // nothing of it is read
	return nil
}

// envoySpec starts Envoy with a fresh bootstrap. Its log goes to a file.
func (m *localMesh) envoySpec() supervise.Spec {
	file := filepath.Join(m.runDir, "bootstrap.json")
	return supervise.Spec{
		Name: "envoy",
		Path: m.paths.Envoy,
		Args: []string{
			"-c", file, "--concurrency", strconv.Itoa(m.set.Mesh.Envoy.Concurrency), "-l", m.set.Mesh.Envoy.LogLevel,
			"--file-flush-interval-msec", "500",
		},
		Log:      m.envoyLog,
		Prepare:  func() error { return m.writeBootstrap(file) },
		MoreArgs: m.hot.args,
		Grace:    graceEnvoy,
	}
}

// envoyNode is the name of this mesh's Envoy. No other mesh has the same.
func (m *localMesh) envoyNode() string {
	if m.set.Mesh.Listen.Sockets != "" { // others may have a folder of that name elsewhere
		return fmt.Sprintf("envoy-%s-%d", filepath.Base(m.runDir), os.Getpid())
	}
	return "envoy-" + filepath.Base(m.runDir)
}

func (m *localMesh) writeBootstrap(file string) error {
	s := socketsIn(m.runDir)
	b, err := envoy.Bootstrap(envoy.BootstrapConfig{
		Node: m.envoyNode(), Zone: m.set.Mesh.Zone,
		Admin: m.addr.admin, XDS: s.xds, Snapshot: s.snapshot, MaxHeap: uint64(m.set.Mesh.Envoy.MaxHeap),
	})
	if err != nil {
		return err
	}
	data, err := envoy.JSON(b)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return fmt.Errorf("write Envoy's bootstrap: %w", err)
	}
	return nil
}
