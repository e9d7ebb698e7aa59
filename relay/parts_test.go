package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"golang.org/x/sync/semaphore"
)

func TestHeldBody(t *testing.T) {
	broken := errors.New("reset")
	for _, tc := range []struct {
		name        string
		src         io.Reader
		size, limit int64
		budget      int64
		want        error
		bytes       int
	}{
		{"known size", strings.NewReader("abc"), 3, 10, 3, nil, 3},
		{"size of the limit", strings.NewReader("abc"), 3, 3, 3, nil, 3},
		{"chunked", strings.NewReader(strings.Repeat("x", 200_000)), -1, 1 << 20, 1 << 20, nil, 200_000},
		{"chunked, of the limit", strings.NewReader(strings.Repeat("x", 200_000)), -1, 200_000, 1 << 20, nil, 200_000},
		{"empty", strings.NewReader(""), -1, 10, 10, nil, 0},
		{"announced too large", strings.NewReader("abcd"), 4, 3, 10, errTooLarge, 0},
		{"longer than announced", strings.NewReader("abcdef"), 2, 3, 10, errTooLarge, 0},
		{"chunked too large", strings.NewReader(strings.Repeat("x", 200_001)), -1, 200_000, 1 << 20, errTooLarge, 0},
		{"no room", strings.NewReader("abc"), 3, 10, 2, errNoRoom, 0},
		{"no room for more", strings.NewReader(strings.Repeat("x", 200_000)), -1, 1 << 20, 100_000, errNoRoom, 0},
		{"broken", io.MultiReader(strings.NewReader("ab"), iotest.ErrReader(broken)), 3, 10, 3, broken, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := &heldBody{budget: semaphore.NewWeighted(tc.budget)}
			err := b.read(iotest.HalfReader(tc.src), tc.size, tc.limit)
			if !errors.Is(err, tc.want) || len(b.data) != tc.bytes {
				t.Fatalf("%d bytes, error %v; want %d, %v", len(b.data), err, tc.bytes, tc.want)
			}
			if b.held < int64(len(b.data)) {
				t.Errorf("holds %d of the budget for %d bytes", b.held, len(b.data))
			}
			b.release()
			b.release()
			if !b.budget.TryAcquire(tc.budget) || b.data != nil {
				t.Error("not all was given back")
			}
		})
	}
}

// TestSending: once closed the transport's body holds nothing.
func TestSending(t *testing.T) {
	s := newSending([]byte("abc"))
	if got, err := io.ReadAll(s); string(got) != "abc" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if err := s.Close(); err != nil || s.r.Load() != nil {
		t.Errorf("closed: %v, holds %v", err, s.r.Load())
	}
	if n, err := s.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read after close: %d, %v", n, err)
	}
}

func TestBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for n, most := range map[int]time.Duration{1: 10 * time.Millisecond, 2: 20 * time.Millisecond, 3: 40 * time.Millisecond, 60: 250 * time.Millisecond} {
			for range 20 {
				start := time.Now()
				if !sleep(t.Context(), backOff(10*time.Millisecond, n)) {
					t.Fatal("a pause ends in failure")
				}
				if took := time.Since(start); took < most/2-1 || took > most {
					t.Errorf("pause %d took %v, want %v to %v", n, took, most/2, most)
				}
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if sleep(ctx, time.Hour) {
			t.Error("a pause outlives its context")
		}
	})
}

// TestWatch: only waiting counts, and a limit replaces the one before.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		errA, errB := errors.New("a"), errors.New("b")
		fired := make(chan error, 1)
		cause := func() error {
			synctest.Wait()
			select {
			case err := <-fired:
				return err
			default:
				return nil
			}
		}
		w := &watch{cancel: func(err error) { fired <- err }}
		w.set(0, errA)
		w.set(10*time.Second, errA)
		time.Sleep(9 * time.Second)
		w.set(5*time.Second, errB)
		for range 10 {
			time.Sleep(4 * time.Second)
			w.busy()
			time.Sleep(time.Minute)
			w.wait(time.Now())
		}
		if err := cause(); err != nil {
			t.Fatalf("fired while nobody waited too long: %v", err)
		}
		time.Sleep(5*time.Second + 1)
		if err := cause(); !errors.Is(err, errB) {
			t.Errorf("fired with %v, want %v", err, errB)
		}
		w.set(time.Second, errA)
		w.stop()
		time.Sleep(time.Minute)
		if err := cause(); err != nil {
			t.Errorf("fired after stop: %v", err)
		}
	})
}

// TestOverSockets runs the relay as in life, over Unix sockets, with many clients
// at once.
func TestOverSockets(t *testing.T) {
	dir := t.TempDir()
	listen := func(name string) net.Listener {
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	dial := func(name string) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, name))
		}
	}
	m := newMesh(t, nil, dial("egress"))
	want := strings.Repeat(token("a", ""), 50) + token("", "stop") + done
	m.serve = func(n int, w http.ResponseWriter, _ *http.Request) {
		if n%5 == 0 {
			cut()
		}
		send(w, strings.SplitAfter(want, "\n\n")...)
	}
	workers := &http.Server{Handler: m, Protocols: protocols(false)}
	l := listen("egress")
	go func() { _ = workers.Serve(l) }()
	defer workers.Close()
	m.connect(listen("relay"), dial("relay"))
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 3 {
				// Two in a row may be cut, three may not be the fault of the relay.
				if got := m.ask(askStream); got.body != want && !(got.status == 502 && strings.Contains(got.body, "broke off")) {
					t.Errorf("%d %q", got.status, got.body)
				}
			}
		})
	}
	wg.Wait()
	m.client.CloseIdleConnections()
	m.stop()
	<-m.done
	m.checkIdle()
	if m.result(resultOK) < 90 || m.result(resultBroken) == 0 {
		t.Errorf("%d answers, %d cut attempts", m.result(resultOK), m.result(resultBroken))
	}
}

func TestConfigValidate(t *testing.T) {
	good := newMesh(t, nil, noEgress).relay.cfg
	for name, spoil := range map[string]func(*Config){
		"policy": func(c *Config) { c.Policy = nil }, "picker": func(c *Config) { c.Picker = nil }, "egress": func(c *Config) { c.DialEgress = nil },
		"budget": func(c *Config) { c.Held = nil }, "metrics": func(c *Config) { c.Registerer = nil }, "log": func(c *Config) { c.Log = nil },
	} {
		c := good
		spoil(&c)
		if _, err := New(c); err == nil {
			t.Errorf("New without %s: no error", name)
		}
	}
	if _, err := New(good); err == nil {
		t.Error("the same metrics twice: no error")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if err := newMesh(t, nil, noEgress).relay.Run(t.Context(), l); err == nil {
		t.Error("Run on a closed listener: no error")
	}
}
