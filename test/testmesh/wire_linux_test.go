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

// TestWire: a megabyte goes there and back between two hosts, also where the wire is slow
// and loses frames, and nothing does where it is down. A host that died is not reached.
func TestWire(t *testing.T) {
	var on [2]*Host
	for i := range on {
		h, err := NewHost(t, i)
		if errors.Is(err, ErrNoHosts) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		on[i] = h
	}
	w, err := NewWire(t, on[0], on[1])
	if err != nil {
		t.Skip(err)
	}
	far, near := w.Addrs[1]+":9000", on[0].Free()
	for i, addr := range []string{near + ">" + far, far} {
		c := on[i].Command(os.Args[0])
		c.Env = append(os.Environ(), echoEnv+"="+addr)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = c.Process.Kill() // fails only when it is gone
			_ = c.Wait()
		}()
	}
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	turn := func(within time.Duration) error {
		c, err := net.DialTimeout("tcp", near, within)
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
	Eventually(t, "a megabyte there and back", time.Minute, func() bool { return turn(20*time.Second) == nil })
	w.Slow(10*time.Millisecond, 50)
	if err := turn(2 * time.Minute); err != nil {
		t.Errorf("slow: %v", err)
	}
	if carried, lost := w.Frames(); lost == 0 || carried < 1000 {
		t.Errorf("%d frames arrived, %d were lost", carried, lost)
	}
	w.Slow(0, 0)
	if err := w.Up(false); err != nil {
		t.Fatal(err)
	}
	if turn(time.Second) == nil {
		t.Error("a megabyte came over a wire that is down")
	}
	if err := w.Up(true); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "it passes again", time.Minute, func() bool { return turn(20*time.Second) == nil })
	if err := on[0].Die(); err != nil {
		t.Fatal(err)
	}
	if turn(time.Second) == nil {
		t.Error("a host that died answers")
	}
}
