package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// headerQuick asks the worker of this test for as much as it gets rid of.
const headerQuick = "X-Quick"

// slowWorker sends 300 tokens at a pace of 5 ms, or events of 4 KiB as fast as it can.
// It counts the bytes of the latter.
func slowWorker(t *testing.T, sock string, sent *atomic.Int64) *http.Server {
	t.Helper()
	lis, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	chunk := func(text, finish string) string {
		return fmt.Sprintf(`data: {"id":"a","object":"text_completion","created":1,"model":"m","choices":[{"token_ids":[1],"index":0,"text":%q,"finish_reason":%s}]}`+"\n\n", text, finish)
	}
	large := chunk(strings.Repeat("x", 4<<10), "null")
	srv := &http.Server{Protocols: h2c(), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 2000}}
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set(names.Upstream, r.Header.Get(names.Destination))
		w.Header().Set(names.Worker, r.Header.Get(names.ExpectWorker))
		rc := http.NewResponseController(w)
		for quick := r.Header.Get(headerQuick) != ""; quick; sent.Add(int64(len(large))) {
			if _, err := io.WriteString(w, large); err != nil || rc.Flush() != nil {
				return
			}
		}
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for range 299 {
			_, _ = io.WriteString(w, chunk("x", "null"))
			_ = rc.Flush()
			<-tick.C
		}
		_, _ = io.WriteString(w, chunk("x", `"length"`)+"data: [DONE]\n\n")
	})
	go func() { _ = srv.Serve(lis) }()
	return srv
}

// A thousand clients that ask for a lot and read nothing, every other of which may come
// back: the relay's memory stays within what a stream may hold, and somebody who reads on
// the same connection gets tokens as before.
func TestThousandStalledClients(t *testing.T) {
	const clients, most = 1000, 1 << 10 // KiB for each: two windows, an event, what is kept, and as much garbage
	var sent atomic.Int64
	dir := t.TempDir()
	workers := slowWorker(t, filepath.Join(dir, "egress"), &sent)
	defer workers.Close()
	cmd, stdin, client := startRelay(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer func() {
		cancel()
		client.CloseIdleConnections()
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("relay process: %v", err)
		}
	}()
	before, empty := interToken(ctx, t, client), testmesh.Resident(cmd.Process.Pid)
	var asked sync.WaitGroup
	for i := range clients {
		asked.Go(func() {
			resp, err := ask(ctx, client, headerQuick, "1", names.Resumable, fmt.Sprint(i%2))
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("client %d: %v, %v", i, resp, err)
			} // and it reads nothing
		})
	}
	asked.Wait()
	last := int64(-1)
	testmesh.Eventually(t, "all of them are stalled", 2*time.Minute, func() bool {
		time.Sleep(time.Second)
		now := sent.Load()
		still := now == last
		last = now
		return still
	})
	full := testmesh.Resident(cmd.Process.Pid)
	during := interToken(ctx, t, client)
	for range 3 { // another's load on this machine only ever adds to it
		if during > before+20*time.Millisecond {
			during = min(during, interToken(ctx, t, client))
		}
	}
	after := testmesh.Resident(cmd.Process.Pid)
	t.Logf("inter-token p99 %v, beside %d stalled clients %v; relay %d MiB, with them %d and %d; %d MiB sent to them",
		before, clients, during, empty>>10, full>>10, after>>10, last>>20)
	if during > before+20*time.Millisecond {
		t.Errorf("inter-token p99 grew from %v to %v", before, during)
	}
	if after > empty+clients*most || sent.Load() != last {
		t.Errorf("the relay holds %d KiB, %d without clients; %d bytes went to clients that read nothing, then %d", after, empty, last, sent.Load())
	}
}

func ask(ctx context.Context, c *http.Client, h ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://relay/v1/completions", strings.NewReader(`{"model":"model-of-the-workers","prompt":"p","stream":true}`))
	if err != nil {
		return nil, err
	}
	req.Header.Set(names.Pool, "pool")
	req.Header.Set(names.ModelRoute, "route")
	req.Header.Set(names.Destination, "10.0.0.0:8000,10.0.0.1:8000")
	for i := 0; i < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	return c.Do(req)
}

// interToken is the 99th percentile of the time between two tokens of a client that reads.
func interToken(ctx context.Context, t *testing.T, c *http.Client) time.Duration {
	t.Helper()
	var gaps []time.Duration
	for range 3 {
		resp, err := ask(ctx, c)
		if err != nil {
			t.Fatal(err)
		}
		var last time.Time
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			if !strings.HasPrefix(lines.Text(), "data: {") {
				continue
			}
			if !last.IsZero() {
				gaps = append(gaps, time.Since(last))
			}
			last = time.Now()
		}
		_ = resp.Body.Close() // it was read to its end
		if err := lines.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if len(gaps) != 3*299 {
		t.Fatalf("%d tokens", len(gaps))
	}
	slices.Sort(gaps)
	return gaps[len(gaps)*99/100]
}
