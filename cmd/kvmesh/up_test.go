package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// A second `up` of a folder says who is there, and leaves everything as it is.
func TestUpOfATakenFolder(t *testing.T) {
	dir := t.TempDir()
	lock, err := supervise.Take(filepath.Join(dir, stateFolder, lockFile))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	upJSON(t, dir, runningMesh{PID: os.Getpid()})
	code, stdout, stderr := command(t, t.Context(), "up", "--dir", dir, "--backend", "127.0.0.1:1")
	if code != 1 || stdout != "" || !strings.Contains(stderr, fmt.Sprintf("running already: process %d holds", os.Getpid())) ||
		!strings.Contains(stderr, "hint: ") || !strings.Contains(stderr, "--dir DIR") {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
	if _, err := os.Stat(filepath.Join(dir, stateFolder, upFile)); err != nil {
		t.Errorf("the other mesh's up.json: %v", err)
	}
}

// A port that is taken is named, with the flag that gives another one.
func TestUpOfATakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	envoy := filepath.Join(t.TempDir(), "envoy")
	if err := os.WriteFile(envoy, []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"--openai", "--admin", "--api", "--metrics"} {
		var out bytes.Buffer
		e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &out, getenv: func(name string) string {
			return map[string]string{"KVMESH_ENVOY": envoy, "XDG_CACHE_HOME": t.TempDir()}[name]
		}}
		dir := t.TempDir()
		code := run(t.Context(), e, []string{"up", "--dir", dir, "--backend", "127.0.0.1:1", flag, strings.Replace(l.Addr().String(), "127.0.0.1", "localhost", 1)})
		if code != 1 || !strings.Contains(out.String(), l.Addr().String()+" cannot be used") || !strings.Contains(out.String(), flag+" 127.0.0.1:0") {
			t.Errorf("%s: exit %d, %s", flag, code, out.String())
		}
		if _, held := supervise.Holder(filepath.Join(dir, stateFolder, lockFile)); held {
			t.Errorf("%s: the folder is still locked", flag)
		}
	}
}

// A backend whose name nobody knows is told at once.
func TestUpUnknownBackend(t *testing.T) {
	code, stdout, stderr := command(t, t.Context(), "up", "--dir", t.TempDir(), "--backend", "no-such-host.invalid")
	if code != 1 || stdout != "" || !strings.Contains(stderr, "--backend no-such-host.invalid, that is http://no-such-host.invalid: the host is not known") || !strings.Contains(stderr, "hint: ") {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
}

func TestUpWrongCalls(t *testing.T) {
	for name, tt := range map[string]struct {
		args   []string
		stderr string
	}{
		"address without a port": {[]string{"--backend", "h:1", "--openai", "127.0.0.1"}, `--openai "127.0.0.1": want ip:port`},
		"address by name":        {[]string{"--backend", "h:1", "--api", "example.org:1"}, `--api "example.org:1": "example.org" is no IP address`},
		"backend of no scheme":   {[]string{"--backend", "ftp://h"}, `--backend "ftp://h": want http://HOST:PORT`},
		"backend of a bad port":  {[]string{"--backend", "http://127.0.0.1:8000", "--backend", "http://x:99999"}, `--backend "http://x:99999": port "99999": want 1 to 65535`},
		"backend with a query":   {[]string{"--backend", "h:1/?a=b"}, `--backend "http://h:1/?a=b": a query or fragment is not supported`},
		"backend with a user":    {[]string{"--backend", "http://me:secret@h:1"}, `--backend "…@h:1": user and password are not supported`},
		"backend with a path":    {[]string{"--backend", "h:1/openai"}, `--backend "http://h:1/openai": a path is not supported`},
		"port twice":             {[]string{"--backend", "h:1", "--api", "127.0.0.1:9000", "--metrics", "127.0.0.1:9000"}, "with --api 127.0.0.1:9000 --metrics 127.0.0.1:9000, listen.api and listen.metrics want the same port"},
		"backend of no host":     {[]string{"--backend", "http://"}, "want http://HOST:PORT"},
	} {
		code, _, stderr := command(t, t.Context(), append([]string{"up", "--dir", t.TempDir()}, tt.args...)...)
		if code != 2 || !strings.Contains(stderr, tt.stderr) {
			t.Errorf("%s: exit %d, %s", name, code, stderr)
		}
	}
}

func TestBackendPolicy(t *testing.T) {
	data, err := backendPolicy([]string{"127.0.0.1:8000", "https://vllm.example/v1"})
	if err != nil {
		t.Fatal(err)
	}
	set, err := policy.Parse(policy.File{Name: "--backend", Data: data})
	if err != nil {
		t.Fatal(err)
	}
	p := set.Pools[0]
	if p.Static[0].URL != "http://127.0.0.1:8000" || p.Static[1].URL != "https://vllm.example/v1" || set.Route("any") == nil {
		t.Errorf("pool = %+v", p)
	}
}

func TestMissingServers(t *testing.T) {
	p := policy.WorkerPool{Static: []policy.Static{{ID: "a", URL: "http://a"}, {ID: "b", URL: "http://b"}, {ID: "c", URL: "http://c"}}}
	known := map[string]fleet.WorkerView{
		"a": {Status: "UNHEALTHY", Reason: "connection refused"},
		"b": {Status: "UNKNOWN"},
	}
	got := strings.Join(missingServers(p, known), "; ")
	if want := "http://a (UNHEALTHY: connection refused); http://b (UNKNOWN); http://c (not asked yet)"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	known["c"] = fleet.WorkerView{Status: "HEALTHY"}
	if got := missingServers(p, known); got != nil {
		t.Errorf("one is enough to begin: %v", got)
	}
}

// Waiting for what never comes ends with where to look, and a signal with the
// signal.
func TestWaitReadyEnds(t *testing.T) {
	m := &localMesh{
		e: &env{stderr: &bytes.Buffer{}}, set: &policy.Set{}, stateDir: "/state", runDir: "/run/x",
		group: supervise.NewGroup(nil, nil),
	}
	m.addr.api, m.addr.metrics, m.addr.admin = "127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:1"
	err := m.waitReady(t.Context(), time.Millisecond)
	if h, ok := errors.AsType[hinter](err); !ok || !strings.Contains(h.Hint(), "/state/logs/envoy.log") ||
		!strings.Contains(err.Error(), "not ready after 1ms; waiting for control plane, gateway, envoy") {
		t.Errorf("time-out: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.waitReady(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("signal: %v", err)
	}
}

func TestLongestSocketFits(t *testing.T) {
	if got := longestSocket(); got != "kvmesh-1234567890/xds-snapshot.sock" {
		t.Errorf("%s", got)
	}
}

func TestPurgeSparesARunningMesh(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HOME", dir)
	t.Setenv("XDG_CACHE_HOME", "")
	lock, err := supervise.Take(filepath.Join(dir, stateFolder, lockFile))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	code, _, stderr := command(t, t.Context(), "purge")
	if code != 1 || !strings.Contains(stderr, fmt.Sprintf("running (process %d)", os.Getpid())) || !strings.Contains(stderr, "--force") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	if _, err := os.Stat(filepath.Join(dir, stateFolder)); err != nil {
		t.Error(err)
	}
	if code, out, _ := command(t, t.Context(), "purge", "--force"); code != 0 || !strings.Contains(out, "removing "+filepath.Join(dir, stateFolder)) {
		t.Errorf("--force: exit %d, %s", code, out)
	}
}

// The KV of local workers is private, below the folder that the policy names, and goes
// with the run.
func TestKVFolder(t *testing.T) {
	parent := t.TempDir()
	for _, tt := range []struct{ dir, want string }{{parent, parent}, {policy.KVOff, ""}, {"", shmDir}} {
		m := &localMesh{e: &env{log: slog.New(slog.DiscardHandler)}, set: &policy.Set{}, runDir: t.TempDir(), workers: make([]localWorker, 1)}
		m.set.Mesh.KV = policy.KV{Dir: tt.dir, Limit: 1 << 20}
		if _, err := freeBytes(shmDir); tt.dir == "" && err != nil {
			tt.want = m.runDir
		}
		if err := m.makeKV(); err != nil {
			t.Fatal(err)
		}
		if tt.want == "" {
			if m.kv.dir != "" {
				t.Errorf("KV in %s although the policy wants none", m.kv.dir)
			}
			continue
		}
		t.Cleanup(func() { os.RemoveAll(m.kv.dir) })
		info, err := os.Stat(m.kv.dir)
		if err != nil || info.Mode().Perm() != 0o700 || m.kv.limit != 1<<20 {
			t.Errorf("%s: %v %v, limit %d", m.kv.dir, info.Mode(), err, m.kv.limit)
		}
		if got := filepath.Dir(m.kv.dir); got != tt.want && got != m.runDir {
			t.Errorf("KV below %s, want %s", got, tt.want)
		}
	}
}

// Without room in shared memory KV goes to the disk, where engines do not find it.
func TestKVFolderWithoutRoom(t *testing.T) {
	m := &localMesh{e: &env{log: slog.New(slog.DiscardHandler)}, set: &policy.Set{}, runDir: "/run"}
	for _, c := range []struct {
		free   int64
		err    error
		listen string
		want   string // "" for an error
		limit  int64
	}{
		{16 << 30, nil, "", shmDir, 4 << 30},
		{16 << 30, nil, "127.0.0.1:1", shmDir, 4 << 30},
		{1 << 30, nil, "127.0.0.1:1", shmDir, 512 << 20},
		{64 << 20, nil, "", "/run", 4 << 30},
		{0, os.ErrNotExist, "", "/run", 4 << 30},
		{64 << 20, nil, "127.0.0.1:1", "", 4 << 30},
		{0, os.ErrNotExist, "127.0.0.1:1", "", 4 << 30},
	} {
		m.kv.limit, m.set.Mesh.KV.LMCache.Listen = 4<<30, c.listen
		dir, err := m.kvParent(c.free, c.err)
		if dir != c.want || (err == nil) != (c.want != "") || m.kv.limit != c.limit {
			t.Errorf("%+v: %q, limit %d, %v", c, dir, m.kv.limit, err)
		}
		if h, ok := errors.AsType[hintError](err); err != nil && (!ok || !strings.Contains(h.hint, "--shm-size")) {
			t.Errorf("%+v: %v has no hint", c, err)
		}
	}
}

// Only a port that another process has is called taken; else Envoy's own reason is told.
func TestPortError(t *testing.T) {
	for why, want := range map[string]string{
		"cannot bind '127.0.0.1:1': Address already in use":            "envoy cannot listen on 127.0.0.1:1: another process took it",
		"cannot bind '127.0.0.1:1': Permission denied":                 "envoy refuses to listen on 127.0.0.1:1: cannot bind '127.0.0.1:1': Permission denied",
		"Proto constraint validation failed (X: value must be inside)": "envoy refuses to listen on 127.0.0.1:1: Proto constraint validation failed (X: value must be inside)",
		"": "envoy refuses to listen on 127.0.0.1:1: it does not say why",
	} {
		if err := portError("127.0.0.1:1", why, "envoy.log"); err.Error() != want {
			t.Errorf("%q: %v, want %s", why, err, want)
		}
	}
}

// A pool that nobody can serve yet is told, with the way to serve it.
func TestPoolsWithoutWorkers(t *testing.T) {
	set := &policy.Set{Pools: []policy.WorkerPool{
		{Name: "none"}, {Name: "own", Local: []policy.Local{{ID: "w"}}}, {Name: "given", Static: []policy.Static{{URL: "http://a"}}},
	}}
	var out bytes.Buffer
	m := &localMesh{e: &env{stderr: &out, getenv: func(string) string { return "" }}, set: set}
	m.addr.api = "127.0.0.1:7"
	m.warnPools()
	if got := out.String(); strings.Count(got, "warning: ") != 1 || !strings.Contains(got, "WorkerPool none has no workers") || !strings.Contains(got, "kvmesh worker --pool none --control-plane 127.0.0.1:7") {
		t.Errorf("%s", got)
	}
	out.Reset()
	set.Mesh.Registry.Redis = "redis://a"
	m.warnPools()
	if out.Len() > 0 {
		t.Errorf("with a registry: %s", out.String())
	}
}
