// Package testmesh starts real meshes for the tests under test/: the kvmesh
// binary built from this tree, a real Envoy, real processes that can be killed.
package testmesh

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Mesh is one running `kvmesh up`.
type Mesh struct {
	OpenAI string `json:"openai"` // base URL, ends in /v1
	Admin  string `json:"admin"`  // Envoy's admin port
	API    string `json:"api"`    // the control plane

	Dir string // working folder; .kvmesh/ is in it
	Log *Log   // what `kvmesh up` wrote to stderr
	cmd *exec.Cmd

	killed bool // "up" itself got SIGKILL
	asked  bool // "up" got SIGTERM; a second one would end it at once
}

// Log collects a process's stderr; safe for concurrent use.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns what was written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Build compiles kvmesh from this tree into dir and returns its path.
func Build(dir string) (string, error) {
	bin := filepath.Join(dir, "kvmesh")
	cmd := exec.Command("go", "build", "-o", bin, "./cmd/kvmesh")
	cmd.Dir = Root()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kvmesh: %w\n%s", err, out)
	}
	return bin, nil
}

// Root returns the root folder of this source tree.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// Start runs `kvmesh up` with args in dir and waits for its ready line. The mesh
// is stopped at the end of the test; on failure the log is shown.
func Start(t testing.TB, bin, dir string, args ...string) *Mesh {
	t.Helper()
	m := &Mesh{Dir: dir, Log: &Log{}}
	m.cmd = exec.Command(bin, append([]string{"up"}, args...)...)
	m.cmd.Dir, m.cmd.Stderr = dir, m.Log
	m.cmd.WaitDelay = 2 * time.Second
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.finish(t) })
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("kvmesh up ended before it was ready: %v", err)
	}
	if err := json.Unmarshal(line, m); err != nil {
		t.Fatalf("ready line %q: %v", line, err)
	}
	return m
}

// StartPolicy is Start with the text of a policy file.
func StartPolicy(t testing.TB, bin, policy string) *Mesh {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "mesh.yaml")
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	return Start(t, bin, dir, "-f", file)
}

func (m *Mesh) finish(t testing.TB) {
	if err := m.Stop(); err != nil {
		t.Errorf("stop the mesh: %v", err)
	}
	if t.Failed() {
		t.Logf("log of kvmesh up:\n%s", m.Log)
		for _, name := range []string{"envoy.log", "access.log"} {
			data, err := os.ReadFile(filepath.Join(m.Dir, ".kvmesh", "logs", name))
			if err == nil {
				t.Logf("%s (end):\n%s", name, data[max(0, len(data)-8<<10):])
			}
		}
	}
}

// Stop ends the mesh with SIGTERM and waits for it. It may be called twice.
func (m *Mesh) Stop() error {
	if m.cmd.ProcessState != nil {
		return nil
	}
	if m.killed {
		_ = m.cmd.Wait() // it was killed on purpose, and says so
		return nil
	}
	if !m.asked {
		_ = m.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	}
	return m.cmd.Wait()
}

// PID returns the process id of a part: "up", "envoy", "gateway",
// "controlplane", or a worker's id. 0 means that it is not running.
func (m *Mesh) PID(part string) int {
	if part == "up" {
		return m.cmd.Process.Pid
	}
	for _, p := range m.processes() {
		if p.name == part {
			return p.pid
		}
	}
	return 0
}

// Parts returns all running parts but "up" with their process ids.
func (m *Mesh) Parts() map[string]int {
	out := map[string]int{}
	for _, p := range m.processes() {
		out[p.name] = p.pid
	}
	return out
}

// KVDir returns the folder in which the local workers keep the KV of their streams, ""
// when they keep none.
func (m *Mesh) KVDir() string {
	for _, p := range m.processes() {
		for _, flag := range []string{"--kv-dir", "--kv-node"} {
			if i := slices.Index(p.args, flag); i >= 0 && i+1 < len(p.args) {
				return p.args[i+1]
			}
		}
	}
	return ""
}

// processes lists the children of `kvmesh up`, named by their command lines.
func (m *Mesh) processes() []process {
	var list []process
	for _, p := range children(m.cmd.Process.Pid) {
		if p.name = partName(p.args); p.name != "" {
			list = append(list, p)
		}
	}
	return list
}

func partName(args []string) string {
	if len(args) < 2 {
		return ""
	}
	if filepath.Base(args[0]) == "envoy" {
		return "envoy"
	}
	if args[1] != "worker" {
		return args[1]
	}
	for i, a := range args[:len(args)-1] {
		if a == "--id" {
			return args[i+1]
		}
	}
	return ""
}

// Signal sends a signal to a part, which must be running. After one to "up" it waits for
// the end, but for SIGSTOP and SIGCONT.
func (m *Mesh) Signal(t testing.TB, part string, sig syscall.Signal) {
	t.Helper()
	pid := m.PID(part)
	if pid == 0 {
		t.Fatalf("%s is not running", part)
	}
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatalf("%v to %s: %v", sig, part, err)
	}
	if part == "up" && sig != syscall.SIGSTOP && sig != syscall.SIGCONT {
		m.killed, m.asked = sig == syscall.SIGKILL, sig == syscall.SIGTERM
		if err := m.Stop(); err != nil {
			t.Errorf("stop the mesh: %v", err)
		}
	}
}

// Workers returns the control plane's list, which must be reachable.
func (m *Mesh) Workers(t testing.TB) []fleet.WorkerView {
	t.Helper()
	list, err := fleet.NewClient(m.API).Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Eventually polls until ok, for states of other processes that send no event.
func Eventually(t testing.TB, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("after %v still not: %s", limit, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// RunDir returns the folder of this run's sockets and generated files.
func (m *Mesh) RunDir(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(m.Dir, ".kvmesh", "up.json"))
	if err != nil {
		t.Fatal(err)
	}
	var up struct {
		RunDir string `json:"run_dir"`
	}
	if err := json.Unmarshal(data, &up); err != nil {
		t.Fatal(err)
	}
	return up.RunDir
}

// Gateway returns the URL of the gateway's /health and /metrics.
func (m *Mesh) Gateway(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(m.Dir, ".kvmesh", "up.json"))
	if err != nil {
		t.Fatal(err)
	}
	var up struct {
		Gateway string `json:"gateway"`
	}
	if err := json.Unmarshal(data, &up); err != nil {
		t.Fatal(err)
	}
	return up.Gateway
}
