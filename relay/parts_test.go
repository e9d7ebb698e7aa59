package relay

import (
	"bytes"
	"context"
	"encoding/json"
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

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for n, most := range map[int]time.Duration{1: 10 * time.Millisecond, 2: 20 * time.Millisecond, 3: 40 * time.Millisecond, 60: 250 * time.Millisecond} {
			for range 20 {
				start := time.Now()
				if !pause(t.Context(), 10*time.Millisecond, n) {
					t.Fatal("a pause ends in failure")
				}
				if took := time.Since(start); took < most/2-1 || took > most {
					t.Errorf("pause %d took %v, want %v to %v", n, took, most/2, most)
				}
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if pause(ctx, time.Hour, 1) {
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

func TestProgress(t *testing.T) {
	for _, tc := range []struct {
		name     string
		events   []string
		multi    bool
		complete bool
		count    int
		failed   bool
	}{
		{"plain", []string{`{"choices":[{"index":0,"text":"a","finish_reason":null}]}`, `{"choices":[{"index":0,"finish_reason" : "stop"}]}`}, false, true, 2, false},
		{"usage wins", []string{`{"choices":[{"finish_reason":"stop"}]}`, `{"choices":[],"usage":{"completion_tokens":9}}`}, false, true, 9, false},
		{"null usage", []string{`{"choices":[{"finish_reason":"stop"}],"usage":null}`}, false, true, 1, false},
		{"text like a member", []string{`{"choices":[{"text":"\"finish_reason\":\"stop\"","finish_reason":null}]}`}, false, false, 1, false},
		{"text is the name", []string{`{"choices":[{"text":"finish_reason","finish_reason":null}]}`}, false, false, 1, false},
		{"one of two", []string{`{"choices":[{"index":1}]}`, `{"choices":[{"index":0,"finish_reason":"stop"}]}`}, true, false, 2, false},
		{"nothing", nil, false, false, 0, false},
		{"error", []string{`{"error":{"message":"x"}}`}, false, false, 0, true},
		{"null error", []string{`{"error":null,"choices":[{"finish_reason":"stop"}]}`}, false, true, 1, false},
		{"no JSON", []string{`finish_reason`, `"finish_reason": oops`}, false, false, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := progress{multi: tc.multi}
			for _, e := range tc.events {
				p.observe([]byte(e))
			}
			if p.complete() != tc.complete || p.count() != tc.count || (p.failed != nil) != tc.failed {
				t.Errorf("complete %v, count %d, failed %s", p.complete(), p.count(), p.failed)
			}
		})
	}
}

// FuzzProgress checks that looking before decoding misses nothing: on JSON objects
// the quick look says the same as decoding each event.
func FuzzProgress(f *testing.F) {
	f.Add([]byte(`{"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":3}}`))
	f.Add([]byte(`{"choices":[{"finish_reason"  :null}],"error":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		// encoding/json also takes names in other case, and escaped ones; workers
		// send neither.
		var fields map[string]json.RawMessage
		if json.Unmarshal(data, &fields) != nil || bytes.ContainsAny(data, `\ſK`) || bytes.ContainsAny(data, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") {
			t.Skip()
		}
		quick, full := progress{}, progress{multi: true}
		quick.observe(data)
		full.observe(data)
		if quick.complete() != full.complete() || quick.tokens != full.tokens || (quick.failed == nil) != (full.failed == nil) {
			t.Errorf("%s: quick %+v, full %+v", data, quick, full)
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
	change := func(c *Config) { c.MinRetries = 100 } // a fifth of the attempts fail, all at once if luck will have it
	m := newMesh(t, change, dial("egress"))
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
