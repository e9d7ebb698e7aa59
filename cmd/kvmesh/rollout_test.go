package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// pretended plays the control plane and the gateway of a mesh for rollouts. A worker's
// start is a line with its id in the file "marks" of the test's folder, which is how
// restart commands start it; a file "away-ID" keeps it out.
type pretended struct {
	t   *testing.T
	url string

	mu      sync.Mutex
	list    []fleet.WorkerView
	minimum int
	drained map[string]bool
	owner   map[string]string // of the pools' leases
}

func newPretended(t *testing.T) *pretended {
	t.Helper()
	t.Chdir(t.TempDir())
	p := &pretended{t: t, minimum: 1, drained: map[string]bool{}, owner: map[string]string{}}
	for _, id := range []string{"w1", "w2", "w3"} {
		p.list = append(p.list, fleet.WorkerView{ID: id, Pool: "main", Model: "m", Status: "HEALTHY", Incarnation: 100, State: fleet.StateReady, Fingerprint: "f"})
	}
	mux := http.NewServeMux()
	answer := func(path string, v func() any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(v()) // the test checks what arrives
		})
	}
	answer("/v1/workers", func() any { return fleet.WorkerList{Workers: p.workers()} })
	answer("/v1/clusters", func() any {
		return fleet.ClusterList{Clusters: []fleet.ClusterView{{Name: "pool/main", Minimum: p.minimum}}}
	})
	answer("/v1/streams", func() any { return fleet.StreamList{} })
	for method, on := range map[string]bool{"POST": true, "DELETE": false} {
		mux.HandleFunc(method+" /v1/workers/{id}/drain", func(_ http.ResponseWriter, r *http.Request) { p.drain(r.PathValue("id"), on) })
	}
	mux.HandleFunc("PUT /v1/pools/{pool}/rollout", func(w http.ResponseWriter, r *http.Request) {
		switch had, owner := p.owner[r.PathValue("pool")], r.URL.Query().Get(fleet.ParamOwner); {
		case owner == "" || len(owner) > fleet.MostOwner:
			http.Error(w, `{"error":{"message":"no owner"}}`, http.StatusBadRequest)
		case had != "" && had != owner:
			http.Error(w, `{"error":{"message":"somebody replaces workers of the pool"}}`, http.StatusConflict)
		}
	})
	mux.HandleFunc("DELETE /v1/pools/{pool}/rollout", func(http.ResponseWriter, *http.Request) {})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	p.url = srv.URL
	return p
}

func (p *pretended) drain(id string, on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drained[id] = on
}

// isDrained reports whether a worker is drained.
func (p *pretended) isDrained(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.drained[id]
}

func (p *pretended) workers() []fleet.WorkerView {
	p.mu.Lock()
	defer p.mu.Unlock()
	marks := p.marks()
	out := []fleet.WorkerView{}
	for _, w := range p.list {
		if _, err := os.Stat("away-" + w.ID); err == nil {
			continue
		}
		for _, id := range marks {
			if id == w.ID {
				w.Incarnation++
			}
		}
		if w.Drained = p.drained[w.ID]; w.Drained {
			w.Status = "DRAINING"
		}
		out = append(out, w)
	}
	return out
}

// marks are the restarts, in order.
func (p *pretended) marks() []string {
	data, err := os.ReadFile("marks")
	if err != nil {
		return nil
	}
	return strings.Fields(string(data))
}

const (
	comesUp    = "rm -f away-$KVMESH_WORKER; echo $KVMESH_WORKER >>marks"
	neverComes = "touch away-$KVMESH_WORKER"
)

// rollout runs the command.
func (p *pretended) rollout(args ...string) (code int, stdout, stderr string) {
	p.t.Helper()
	return command(p.t, p.t.Context(), append([]string{"rollout", "--api", p.url, "--gateway", p.url, "--observe", "0", "--ready-timeout", "300ms"}, args...)...)
}

// A new version that never comes up: the way back, the same command with a repaired
// version and a new start all bring the worker back while it is away.
func TestRolloutOfWorkerThatIsAway(t *testing.T) {
	for name, again := range map[string][]string{
		"rollback":       {"--rollback"},
		"the same":       {},
		"with the names": {"w1", "w2", "w3"},
		"start over":     {"--start-over", "--restart-cmd", comesUp},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPretended(t)
			version := func(text string) {
				if err := os.WriteFile("version", []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			version(neverComes)
			code, _, stderr := p.rollout("--restart-cmd", ". ./version", "--rollback-cmd", comesUp, "--journal", "j.json")
			if code != 1 || !strings.Contains(stderr, "w1: not ready") || !strings.Contains(stderr, "rollout --rollback --journal j.json") {
				t.Fatalf("exit %d, %s", code, stderr)
			}
			version(comesUp)
			code, _, stderr = p.rollout(append([]string{"--journal", "j.json"}, again...)...)
			want := []string{"w1", "w2", "w3"}
			if name == "rollback" {
				want = want[:1]
			}
			if code != 0 || !slices.Equal(p.marks(), want) || p.isDrained("w1") {
				t.Errorf("exit %d, restarted %q, w1 drained %v: %s", code, p.marks(), p.isDrained("w1"), stderr)
			}
		})
	}
}

// A worker that a killed rollout had only drained takes requests again after --rollback
// and after --start-over.
func TestRolloutGivesBackWhatItDrained(t *testing.T) {
	for _, way := range []string{"--rollback", "--start-over"} {
		p := newPretended(t)
		p.drained["w2"] = true
		if err := os.WriteFile("j.json", []byte(`{"restart_cmd":"false","plan":{"steps":[{"worker":"w2","pool":"main","state":"draining","incarnation":100,"drained":true}]}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		code, _, stderr := p.rollout(way, "--journal", "j.json", "--restart-cmd", comesUp)
		if code != 0 || p.isDrained("w2") || !strings.Contains(stderr, "w2: takes requests again") {
			t.Errorf("%s: exit %d, drained %v: %s", way, code, p.isDrained("w2"), stderr)
		}
	}
}

// An operator's drain of a worker that --start-over gave back holds.
func TestStartOverForgetsItsDrains(t *testing.T) {
	p := newPretended(t)
	p.drain("w2", true)
	writeFile(t, "j.json", `{"restart_cmd":"false","plan":{"steps":[{"worker":"w2","pool":"main","state":"draining","incarnation":100,"drained":true}]}}`)
	writeFile(t, "version", "exit 1")
	args := []string{"w1", "w2", "--restart-cmd", ". ./version", "--journal", "j.json"}
	if code, _, stderr := p.rollout(append(args, "--start-over")...); code != 1 || p.isDrained("w2") {
		t.Fatalf("exit %d, w2 drained %v: %s", code, p.isDrained("w2"), stderr)
	}
	p.drain("w2", true) // the operator
	writeFile(t, "version", comesUp)
	code, _, stderr := p.rollout(args...)
	if code != 0 || !slices.Equal(p.marks(), []string{"w1", "w2"}) || p.isDrained("w1") || !p.isDrained("w2") {
		t.Errorf("exit %d, restarted %q, drained %v %v: %s", code, p.marks(), p.isDrained("w1"), p.isDrained("w2"), stderr)
	}
}

// What the rollout of before drained is given back only while nobody else may touch its
// pool.
func TestGivenBackUnderALease(t *testing.T) {
	p := newPretended(t)
	p.owner["other"] = "somebody"
	p.drain("w9", true)
	writeFile(t, "j.json", `{"restart_cmd":"false","plan":{"steps":[{"worker":"w9","pool":"other","state":"draining","incarnation":100,"drained":true}]}}`)
	args := []string{"--start-over", "w1", "--restart-cmd", comesUp, "--journal", "j.json"}
	if code, _, stderr := p.rollout(args...); code != 1 || !p.isDrained("w9") || len(p.marks()) > 0 || !strings.Contains(stderr, "another rollout of this pool is under way") {
		t.Errorf("leased: exit %d, drained %v, restarted %q: %s", code, p.isDrained("w9"), p.marks(), stderr)
	}
	delete(p.owner, "other")
	if code, _, stderr := p.rollout(args...); code != 0 || p.isDrained("w9") || !slices.Equal(p.marks(), []string{"w1"}) {
		t.Errorf("free: exit %d, drained %v, restarted %q: %s", code, p.isDrained("w9"), p.marks(), stderr)
	}
}

// A lease's owner is not longer than it may be, whatever the journal's path.
func TestJournalWithALongPath(t *testing.T) {
	p := newPretended(t)
	dir := strings.Repeat(strings.Repeat("d", 100)+"/", 4)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := p.rollout("w1", "--restart-cmd", comesUp, "--journal", dir+"j.json"); code != 0 || !slices.Equal(p.marks(), []string{"w1"}) {
		t.Errorf("exit %d, restarted %q: %s", code, p.marks(), stderr)
	}
	short, one, two := (&rolloutOptions{journal: "j.json"}).owner(), (&rolloutOptions{journal: dir + "1"}).owner(), (&rolloutOptions{journal: dir + "2"}).owner()
	if !strings.HasSuffix(short, "journal j.json") || one == two || len(one) > fleet.MostOwner {
		t.Errorf("owners %q, %q, %q", short, one, two)
	}
}

// writeFile writes a file of the test's folder.
func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRolloutIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, args, want string
		prepare          func(*pretended)
	}{
		{"another rollout of the pool", "w1", "another rollout of this pool is under way: somebody", func(p *pretended) { p.owner["main"] = "somebody" }},
		{"a server", "w1", "w1 is a server that tells nothing of its starts", func(p *pretended) { p.list[0].Incarnation = fleet.ForeignIncarnation }},
		{"a server, dry", "--dry-run w1", "w1 is a server that tells nothing of its starts", func(p *pretended) { p.list[0].Incarnation = fleet.ForeignIncarnation }},
		{"another model", "--model nope w1", "--model nope: w1 serves m", nil},
		{"another pool", "--pool nope w1", "--pool nope: w1 is of pool main", nil},
		{"no room ever", "w1", "at least 3 others must, which can never be", func(p *pretended) { p.minimum = 3 }},
		{"no such worker", "w9", "no such worker: w9", nil},
		{"a rollback that is not finished", "w1", "go on with --rollback", func(*pretended) {
			_ = os.MkdirAll(stateFolder, 0o700) // the write would fail
			_ = os.WriteFile(filepath.Join(stateFolder, "rollout.json"), []byte(`{"back":true,"plan":{"steps":[{"worker":"w1","state":"pending"}]}}`), 0o600)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPretended(t)
			if c.prepare != nil {
				c.prepare(p)
			}
			code, stdout, stderr := p.rollout(append([]string{"--restart-cmd", comesUp}, strings.Fields(c.args)...)...)
			if code == 0 || !strings.Contains(stderr, c.want) || len(p.marks()) > 0 || len(p.drained) > 0 {
				t.Errorf("exit %d, restarted %q, drained %v: %s%s", code, p.marks(), p.drained, stdout, stderr)
			}
		})
	}
	p := newPretended(t)
	l, err := supervise.Take(filepath.Join(stateFolder, "rollout.json.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if code, _, stderr := p.rollout(); code != 1 || !strings.Contains(stderr, "a rollout with this journal is under way") {
		t.Errorf("a journal in use: exit %d, %s", code, stderr)
	}
}

func TestRolloutDryRun(t *testing.T) {
	p := newPretended(t)
	p.minimum = 2
	code, stdout, stderr := p.rollout("--dry-run")
	if code != 0 || !strings.Contains(stdout, "3 of 3 workers take requests; while one is restarted, at least 2 others must\n") {
		t.Errorf("exit %d: %s%s", code, stdout, stderr)
	}
	p.minimum = 3
	if code, stdout, _ = p.rollout("--dry-run"); code != 0 || !strings.Contains(stdout, "which can never be") {
		t.Errorf("exit %d: %s", code, stdout)
	}
	p.list[0].Incarnation = fleet.ForeignIncarnation
	if code, stdout, stderr = p.rollout("--dry-run", "-o", "json"); code != 0 || strings.Contains(stdout, `"w1"`) || !strings.Contains(stderr, "w1: left out") {
		t.Errorf("a server among workers: exit %d: %s%s", code, stdout, stderr)
	}
}

// A signal goes to the worker's own process and nowhere else.
func TestSignalsReachWorkersOnly(t *testing.T) {
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	t.Cleanup(func() { _ = c.Process.Kill() }) // fails where it ended, as it should
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	pid := int64(c.Process.Pid)
	mark := supervise.ProcessMark(c.Process.Pid)
	for name, w := range map[string]fleet.WorkerView{
		"of another machine":   {ID: "far", PID: pid, Host: "another-machine", Process: "0123456789abcdef", Incarnation: 100},
		"that tells no mark":   {ID: "old", PID: pid, Incarnation: 100},
		"whose number is gone": {ID: "gone", PID: pid, Process: supervise.ProcessMark(os.Getpid()), Incarnation: 100},
		"without a process":    {ID: "far", Incarnation: 100},
	} {
		if err := terminate(w); err == nil || !strings.Contains(err.Error(), w.ID) {
			t.Errorf("a worker %s: %v", name, err)
		}
	}
	select {
	case err := <-ended:
		t.Fatalf("a process that is no worker was ended: %v", err)
	default:
	}
	if err := terminate(fleet.WorkerView{ID: "w", PID: pid, Host: host, Process: mark, Incarnation: 100}); err != nil {
		t.Fatal(err)
	}
	<-ended
}

// Drills do not touch what only has the number of a worker's process.
func TestDrillsReachWorkersOnly(t *testing.T) {
	w := fleet.WorkerView{ID: "far", PID: int64(os.Getpid()), Host: "another-machine", Zone: "z"}
	for _, fault := range []string{faultKill, faultHang, faultSlow, faultZone, faultCorrupt} {
		here := fleet.WorkerView{ID: "near", PID: int64(os.Getpid()), Process: supervise.ProcessMark(os.Getpid()), Zone: "z"}
		h := &harm{d: &driller{note: func(string, ...any) {}}, fault: fault, list: []fleet.WorkerView{w, here}}
		asked := "far"
		if fault == faultZone {
			asked = "near" // and another one of its zone is elsewhere
		}
		if err := h.do(t.Context(), &heard{worker: asked}); err == nil || !strings.Contains(err.Error(), "another-machine") {
			t.Errorf("%s: %v", fault, err)
		}
	}
}
