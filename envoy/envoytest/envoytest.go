// Package envoytest runs a real Envoy in tests.
package envoytest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"

	"github.com/kvmesh/kvmesh/envoy"
)

// Binary returns the path of Envoy, and skips the test when it was not fetched.
func Binary(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
	}
	path := filepath.Join(dir, ".tools", "envoy")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("no Envoy at %s: run `make tools`", path)
	}
	return path
}

// Validate has Envoy check a configuration without running it.
func Validate(t testing.TB, b *bootstrapv3.Bootstrap) {
	t.Helper()
	cmd := exec.Command(Binary(t), "--mode", "validate", "-l", "warning", "-c", write(t, b))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("envoy --mode validate: %v\n%s", err, out)
	}
}

// Process is a running Envoy.
type Process struct {
	Admin string // ip:port of the admin interface
	// Dir is the test's directory with Envoy's config.json and log.
	Dir string

	t   testing.TB
	cmd *exec.Cmd
}

// Start runs Envoy until the end of the test and waits for its admin interface.
// The bootstrap's admin port may be 0.
func Start(t testing.TB, b *bootstrapv3.Bootstrap) *Process {
	t.Helper()
	bin, config := Binary(t), write(t, b)
	p := &Process{t: t, Dir: filepath.Dir(config)}
	log, err := os.Create(filepath.Join(p.Dir, "envoy.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	addressFile := filepath.Join(p.Dir, "admin")
	p.cmd = exec.Command(bin, "-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", "warning",
		"--file-flush-interval-msec", "50", "--admin-address-path", addressFile)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start envoy: %v", err)
	}
	t.Cleanup(p.stop)
	Eventually(t, 20*time.Second, "envoy's admin interface", func() bool {
		addr, err := os.ReadFile(addressFile)
		p.Admin = strings.TrimSpace(string(addr))
		return err == nil && p.Admin != ""
	})
	return p
}

// Kill ends Envoy at once, as SIGKILL does.
func (p *Process) Kill() {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("kill envoy: %v", err)
	}
	_ = p.cmd.Wait() // its status is that of the kill
}

// stop ends Envoy with the test, and shows its log when the test failed.
func (p *Process) stop() {
	p.Kill()
	if p.t.Failed() {
		if log, err := os.ReadFile(filepath.Join(p.Dir, "envoy.log")); err == nil {
			p.t.Logf("envoy's log:\n%s", bytes.TrimSpace(log))
		}
	}
}

// write puts the bootstrap into a short directory: sockets live beside it.
func write(t testing.TB, b *bootstrapv3.Bootstrap) string {
	t.Helper()
	raw, err := envoy.JSON(b)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(Dir(t), "config.json")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Dir makes a directory for one test whose path is short enough for sockets.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// FreePort returns a loopback address that nothing listens on.
func FreePort(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// Eventually asks until ok says yes, and fails the test when it does not in time.
func Eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited %v in vain for %s", limit, what)
		case <-tick.C:
		}
	}
}
