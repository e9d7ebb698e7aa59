package testmesh

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// echoEnv makes the test binary a process of a host that sends back what it gets; its value
// is the address.
const echoEnv = "TESTMESH_ECHO"

func TestMain(m *testing.M) {
	if addr := os.Getenv(echoEnv); addr != "" {
		os.Exit(echo(addr))
	}
	os.Exit(m.Run())
}

// echo listens on an address, or, where that is of the form "A>B", passes on from A to B.
func echo(addr string) int {
	from, to, pass := bytes.Cut([]byte(addr), []byte(">"))
	l, err := net.Listen("tcp", string(from))
	if err != nil {
		return 1
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return 1
		}
		go func() {
			defer c.Close()
			if !pass {
				_, _ = io.Copy(c, c) // until the other side has enough
				return
			}
			up, err := net.Dial("tcp", string(to))
			if err != nil {
				return
			}
			defer up.Close()
			go io.Copy(up, c)
			_, _ = io.Copy(c, up) // likewise
		}()
	}
}

// TestWire: a megabyte goes there and back between two hosts, or this machine and a host,
// also where the wire is slow and loses frames, and nothing does where it is down. What
// became of the frames is counted.
func TestWire(t *testing.T) {
	t.Run("two hosts", func(t *testing.T) {
		a := newHost(t, 0)
		w := newWire(t, a, newHost(t, 1))
		near := a.Free()
		run(t, a, near+">"+w.Addrs[1]+":9000")
		wire(t, w, near)
		if err := a.Die(); err != nil {
			t.Fatal(err)
		}
		if turn(near, time.Second) == nil {
			t.Error("a host that died answers")
		}
	})
	t.Run("this machine and a host", func(t *testing.T) {
		w := newWire(t, nil, newHost(t, 0))
		wire(t, w, w.Addrs[1]+":9000")
	})
}

func newHost(t *testing.T, no int) *Host {
	t.Helper()
	h, err := NewHost(t, no)
	if errors.Is(err, ErrNoHosts) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// newWire joins two hosts, on the second of which somebody sends back what he gets at port
// 9000.
func newWire(t *testing.T, a, b *Host) *Wire {
	t.Helper()
	w, err := NewWire(t, a, b)
	if errors.Is(err, ErrNoHosts) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	run(t, b, w.Addrs[1]+":9000")
	return w
}

// run starts an echo on a host, which ends with the test.
func run(t *testing.T, h *Host, addr string) {
	t.Helper()
	c := h.Command(os.Args[0])
	c.Env = append(os.Environ(), echoEnv+"="+addr)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // fails only when it is gone
		_ = c.Wait()
	})
}

// wire tests a wire, behind which somebody sends back what he gets at addr.
func wire(t *testing.T, w *Wire, addr string) {
	t.Helper()
	Eventually(t, "a megabyte there and back", time.Minute, func() bool { return turn(addr, 20*time.Second) == nil })
	whole := w.Frames()
	if whole.Carried < 1000 || whole != (Frames{Carried: whole.Carried}) {
		t.Errorf("a wire that is whole: %+v", whole)
	}
	w.Slow(10*time.Millisecond, 50)
	if err := turn(addr, 2*time.Minute); err != nil {
		t.Errorf("slow: %v", err)
	}
	w.Slow(0, 0)
	slow := w.Frames()
	if slow.Lost == 0 || slow.Late < 1000 || slow.Cut > 0 {
		t.Errorf("a wire that was slow: %+v", slow)
	}
	w.Up(false)
	Eventually(t, "frames to be lost where the wire is down", time.Minute, func() bool {
		if turn(addr, time.Second) == nil {
			t.Fatal("a megabyte came over a wire that is down")
		}
		return w.Frames().Cut > 0
	})
	w.Up(true)
	Eventually(t, "it passes again", time.Minute, func() bool { return turn(addr, 20*time.Second) == nil })
}

// turn sends a megabyte and takes it back.
func turn(addr string, within time.Duration) error {
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	c, err := net.DialTimeout("tcp", addr, within)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	go c.Write(want)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return errors.New("it came back changed")
	}
	return nil
}
