package xds_test

import (
	"bufio"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/fleet"
)

// believer is an Envoy that takes its configuration from the control plane.
type believer struct {
	t       testing.TB
	process *envoytest.Process
	admin   *admin.Client
}

func (p *plane) startEnvoy(snapshot string) *believer {
	p.t.Helper()
	e := p.envoy(snapshot)
	b := &believer{t: p.t, process: e, admin: admin.NewClient("http://" + e.Admin)}
	envoytest.Eventually(p.t, 20*time.Second, "Envoy to be ready", func() bool {
		return b.admin.Ready(p.t.Context()) == nil
	})
	return b
}

// hosts returns what Envoy believes of pool main, by worker.
func (b *believer) hosts() map[string]admin.Host {
	b.t.Helper()
	list, err := b.admin.Clusters(b.t.Context(), "^pool/main$")
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]admin.Host{}
	for _, c := range list {
		for _, h := range c.Hosts {
			out[h.WorkerID] = h
		}
	}
	return out
}

func (b *believer) host(id, what string, ok func(admin.Host) bool) {
	b.t.Helper()
	envoytest.Eventually(b.t, 10*time.Second, "Envoy to have "+id+" "+what, func() bool {
		h, known := b.hosts()[id]
		return known && ok(h)
	})
}

func (b *believer) stat(name string) uint64 {
	b.t.Helper()
	all, err := b.admin.Stats(b.t.Context(), "^"+name+"$")
	if err != nil {
		b.t.Fatal(err)
	}
	return all[name]
}

func TestEnvoyFollowsLoadDrainAndDeath(t *testing.T) {
	envoytest.Binary(t)
	p := newPlane(t, onePool)
	w0, w1 := startWorker(t, "w0"), startWorker(t, "w1")
	p.register(w0)
	p.register(w1)
	e := p.startEnvoy("")
	e.host("w0", "at weight 200", func(h admin.Host) bool { return h.Weight == 200 && h.Zone == "a" })
	w0.load(1)
	e.host("w0", "at weight 100", func(h admin.Host) bool { return h.Weight == 100 })
	if h := e.hosts()["w1"]; h.Weight != 200 {
		t.Errorf("w1 has weight %d, want its own 200", h.Weight)
	}

	if err := p.client.Drain(t.Context(), "w0", true); err != nil {
		t.Fatal(err)
	}
	e.host("w0", "draining", func(h admin.Host) bool { return h.EDSHealth == "DRAINING" })
	if err := p.client.Drain(t.Context(), "w0", false); err != nil {
		t.Fatal(err)
	}
	e.host("w0", "healthy", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" })

	_ = w1.srv.Close()
	e.host("w1", "unhealthy", func(h admin.Host) bool { return h.EDSHealth == "UNHEALTHY" })
	if status, _ := p.call("DELETE", "/v1/workers/w1", nil); status != 204 {
		t.Errorf("deregister: %d", status)
	}
	envoytest.Eventually(t, 10*time.Second, "w1 to be gone", func() bool {
		_, there := e.hosts()["w1"]
		return !there
	})
	if n := e.stat("cluster_manager.cds.update_rejected") + e.stat("listener_manager.lds.update_rejected"); n != 0 {
		t.Errorf("Envoy refused %d updates", n)
	}
}

// A killed control plane comes back with the same workers; Envoy goes on serving
// meanwhile and loses nothing when the new one answers.
func TestRestartIsNotNoticed(t *testing.T) {
	envoytest.Binary(t)
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	p.register(w)
	p.wants("w0", "healthy", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	e := p.startEnvoy("")
	e.host("w0", "healthy", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" && !h.FailedActiveHealthCheck })

	stop := make(chan struct{})
	done := make(chan struct{})
	var sent, failed atomic.Int32
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			sent.Add(1)
			if res, err := http.Get("http://" + p.config.Envoy.Edge + "/v1/models"); err != nil {
				failed.Add(1)
			} else {
				_ = res.Body.Close()
				if res.StatusCode != 200 {
					failed.Add(1)
				}
			}
		}
	}()
	for range 2 {
		updates := e.stat("cluster.pool/main.update_success")
		p.crash()
		p.start()
		w.load(w.now() * 2)
		envoytest.Eventually(t, 10*time.Second, "an update by the new control plane", func() bool {
			return e.stat("cluster.pool/main.update_success") > updates
		})
	}
	close(stop)
	<-done
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), sent.Load())
	}
	if n := e.stat("cluster_manager.cluster_removed") + e.stat("cluster_manager.cluster_modified") + e.stat("listener_manager.listener_modified"); n != 0 {
		t.Errorf("%d clusters or listeners were touched by the restarts", n)
	}
}

// crash ends the control plane as SIGKILL does: what it had not stored is lost.
func (p *plane) crash() {
	p.t.Helper()
	path := filepath.Join(p.config.StateDir, "registry.json")
	before, err := os.ReadFile(path)
	if err != nil {
		p.t.Fatal(err)
	}
	p.stop()
	if err := os.WriteFile(path, before, 0o600); err != nil {
		p.t.Fatal(err)
	}
}

func (w *fakeWorker) now() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.report.GetApplicationUtilization()
}

// A cluster that changes while its endpoints do not must not stay warming.
func TestClusterChangeWithoutEndpointChange(t *testing.T) {
	envoytest.Binary(t)
	p := newPlane(t, onePool)
	p.register(startWorker(t, "w0"))
	e := p.startEnvoy("")
	e.host("w0", "healthy", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" })
	for i, connect := range []string{"2s", "3s"} {
		if err := p.cp.Reload(parse(t, strings.Replace(onePool, "spec:", "spec:\n  connect: "+connect, 1))); err != nil {
			t.Fatal(err)
		}
		envoytest.Eventually(t, 10*time.Second, "the changed cluster", func() bool {
			return e.stat("cluster_manager.cluster_modified") == uint64(i+1) && e.stat("cluster_manager.warming_clusters") == 0
		})
		e.host("w0", "still there", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" })
	}

	// The same across a restart: the new process knows nothing of the old names.
	p.crash()
	p.config.Envoy.Policy = parse(t, strings.Replace(onePool, "spec:", "spec:\n  connect: 4s", 1))
	p.start()
	envoytest.Eventually(t, 10*time.Second, "the changed cluster", func() bool {
		return e.stat("cluster_manager.cluster_modified") == 3 && e.stat("cluster_manager.warming_clusters") == 0
	})
	e.host("w0", "still there", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" })

	second := onePool + "---" + strings.ReplaceAll(onePool, "main", "other")
	second = strings.Replace(second, "local: [{id: w0}]", "local: [{id: w9}]", 1)
	if err := p.cp.Reload(parse(t, second)); err != nil {
		t.Fatal(err)
	}
	envoytest.Eventually(t, 10*time.Second, "the added cluster", func() bool {
		return e.stat("cluster_manager.active_clusters") == 5 && e.stat("cluster_manager.warming_clusters") == 0
	})
	if err := p.cp.Reload(parse(t, onePool)); err != nil {
		t.Fatal(err)
	}
	envoytest.Eventually(t, 10*time.Second, "the removed cluster", func() bool {
		return e.stat("cluster_manager.active_clusters") == 4
	})
	e.host("w0", "still there", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" })
}

// A stream in flight outlives every change of its worker's standing.
func TestStreamsSurvivePushes(t *testing.T) {
	envoytest.Binary(t)
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	release := make(chan struct{})
	w.answer = func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(rw, "first\n")
		rw.(http.Flusher).Flush()
		<-release
		_, _ = io.WriteString(rw, "last\n")
	}
	p.register(w)
	e := p.startEnvoy("")
	e.host("w0", "healthy", func(h admin.Host) bool { return h.EDSHealth == "HEALTHY" && !h.FailedActiveHealthCheck })
	res, err := http.Get("http://" + p.config.Envoy.Edge + "/v1/x")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewReader(res.Body)
	if line, err := lines.ReadString('\n'); line != "first\n" {
		t.Fatalf("%q, %v", line, err)
	}
	w.load(1)
	e.host("w0", "at weight 100", func(h admin.Host) bool { return h.Weight == 100 })
	if err := p.client.Drain(t.Context(), "w0", true); err != nil {
		t.Fatal(err)
	}
	e.host("w0", "draining", func(h admin.Host) bool { return h.EDSHealth == "DRAINING" })
	p.call("DELETE", "/v1/workers/w0", nil)
	envoytest.Eventually(t, 10*time.Second, "w0 to be gone", func() bool { return len(e.hosts()) == 0 })
	close(release)
	if line, err := lines.ReadString('\n'); line != "last\n" {
		t.Errorf("%q, %v; want the end of the stream", line, err)
	}
}
