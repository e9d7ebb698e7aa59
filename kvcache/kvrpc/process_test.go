//go:build unix

package kvrpc

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// peerEnv makes the test binary a server; its value is a childSpec.
const peerEnv = "KVRPC_TEST"

// childSpec says what a child serves, as JSON.
type childSpec struct {
	Sendfile bool   // of "bare"
	Kind     string // "" is a Server of an arena; "grpc" and "bare" are for BenchmarkChannels
	Limit    int64
	Addr     string
	Dir      string
	ID       *Identity
	// Prefault is that of the arena.
	Prefault bool
}

// serveChild serves until it is killed. Its first line is the address.
func serveChild(text string) {
	if err := serveSpec(text); err != nil {
		fmt.Println("error", err)
	}
	os.Exit(1)
}

func serveSpec(text string) error {
	var spec childSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	if spec.Kind == "" {
		sc := ServerConfig{}
		if spec.ID != nil {
			var err error
			if sc.TLS, err = spec.ID.Server(); err != nil {
				return err
			}
		}
		n, err := startNode(arena.Config{Dir: spec.Dir, Limit: spec.Limit, Prefault: spec.Prefault}, spec.Addr, sc)
		if err != nil {
			return err
		}
		fmt.Println(n.addr)
		return <-n.ended
	}
	l, err := net.Listen("tcp", spec.Addr)
	if err != nil {
		return err
	}
	if spec.Kind == "grpc" {
		store, err := arena.Open(arena.Config{Dir: spec.Dir, Limit: spec.Limit, Prefault: spec.Prefault})
		if err != nil {
			return err
		}
		fmt.Println(l.Addr())
		return newBytesServer(NewServer(store, ServerConfig{})).Serve(l)
	}
	fmt.Println(l.Addr())
	c, err := l.Accept()
	if err != nil {
		return err
	}
	return serveBare(c, spec.Dir, spec.Sendfile)
}

// process is a server that is a process of its own.
type process struct {
	addr string
	cmd  *exec.Cmd
	spec childSpec
}

// startPeer starts one and waits until it listens. It ends with the test.
func startPeer(t testing.TB, spec childSpec) *process {
	t.Helper()
	if spec.Addr == "" {
		spec.Addr = "127.0.0.1:0"
	}
	p := &process{spec: spec}
	t.Cleanup(p.kill)
	p.start(t)
	return p
}

// start starts it, again after kill: then at the same address.
func (p *process) start(t testing.TB) {
	t.Helper()
	text, err := json.Marshal(p.spec)
	if err != nil {
		t.Fatal(err)
	}
	p.cmd = exec.Command(os.Args[0], "-test.run=^$")
	p.cmd.Env = append(p.cmd.Environ(), peerEnv+"="+string(text))
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	if _, _, err := net.SplitHostPort(strings.TrimSpace(line)); err != nil {
		t.Fatalf("the server says %q", line)
	}
	p.addr = strings.TrimSpace(line)
	p.spec.Addr = p.addr
}

// kill ends it with SIGKILL.
func (p *process) kill() {
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Kill() // it may have ended
		_ = p.cmd.Wait()         // and then its status says so
	}
}

// stop stops it with SIGSTOP, and waits until all of its threads have stopped.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var how syscall.WaitStatus
	if _, err := syscall.Wait4(p.cmd.Process.Pid, &how, syscall.WUNTRACED, nil); err != nil || !how.Stopped() {
		t.Fatalf("the server has not stopped: %v", err)
	}
}

// newClient makes a client until the test ends.
func newClient(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := Dial(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// clientTLS is an identity's side of a client.
func clientTLS(t testing.TB, id Identity) *tls.Config {
	t.Helper()
	c, err := id.Client()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// shmDir makes a folder in shared memory, where there is some.
func shmDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvrpc-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
