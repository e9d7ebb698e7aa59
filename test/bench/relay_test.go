package bench

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/relay"
)

// relaySecret makes the benchmark's workers ours, whose answers the relay can move.
const relaySecret = "secret"

// relayDir and relayKind make TestRelayProcess the process that is measured.
var (
	relayDir  = flag.String("relay-dir", "", "folder of the sockets of a relay to run until stdin ends")
	relayKind = flag.String("relay-kind", kindRelay, "what to run there: relay, proxy or copy")
)

// What can stand where the relay does.
const (
	kindRelay = "relay"
	kindProxy = "proxy" // net/http's HTTP/2 on both sides, as the relay has it, and nothing else
	kindCopy  = "copy"  // bytes from one socket to the other, whatever they mean
)

// TestRelayProcess runs a relay in a process of its own, so that its CPU time can
// be told from the client's and the worker's. Alone it does nothing.
func TestRelayProcess(t *testing.T) {
	if *relayDir == "" {
		t.Skip("is the child process of BenchmarkRelay")
	}
	lis, err := net.Listen("unix", filepath.Join(*relayDir, "relay"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	fmt.Println("serving")
	switch *relayKind {
	case kindProxy:
		runProxy(ctx, lis)
	case kindCopy:
		runCopy(ctx, lis)
	default:
		runRelay(ctx, t, lis)
	}
}

// dialEgress connects to the workers of the measured process.
func dialEgress(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(*relayDir, "egress"))
}

// runRelay is the relay as the gateway runs it.
func runRelay(ctx context.Context, t *testing.T, lis net.Listener) {
	p := newParts(t, 3)
	r, err := relay.New(relay.Config{
		Policy: p.set, Picker: p.pick, Held: p.held, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler), Secret: relaySecret,
		DialEgress: dialEgress,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Run(ctx, lis); err != nil {
		t.Fatal(err)
	}
}

// runProxy forwards requests over HTTP/2 and each piece of an answer at once.
func runProxy(ctx context.Context, lis net.Listener) {
	proxy := &httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite:       func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", "egress" },
		Transport: &http.Transport{
			Protocols: h2c(), DisableCompression: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dialEgress(ctx) },
		},
	}
	srv := &http.Server{Handler: proxy, Protocols: h2c(), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 1000}}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	_ = srv.Serve(lis)
}

// runCopy copies bytes: the client and the workers have one HTTP/2 connection through it.
func runCopy(ctx context.Context, lis net.Listener) {
	defer context.AfterFunc(ctx, func() { _ = lis.Close() })()
	for {
		down, err := lis.Accept()
		if err != nil {
			return
		}
		up, err := dialEgress(ctx)
		if err != nil {
			return
		}
		for _, way := range [][2]net.Conn{{down, up}, {up, down}} {
			go func() { // the structs hide what would copy without system calls of its own
				_, _ = io.Copy(struct{ io.Writer }{way[0]}, struct{ io.Reader }{way[1]})
			}()
		}
	}
}

// BenchmarkRelay measures the relay's own CPU time per token, with streams at the
// pace of a real model: 100 streams of 50 tokens per second. Their tokens come one by one,
// or all at the same moments as those of an engine that computes them in one batch. Beside
// it, in the same run, is what the same streams cost a process that does less.
func BenchmarkRelay(b *testing.B) {
	for _, together := range []bool{false, true} {
		when := "single"
		if together {
			when = "batched"
		}
		for _, kind := range []string{kindRelay, kindProxy, kindCopy} {
			b.Run(when+"/"+kind, func(b *testing.B) { benchRelay(b, kind, together) })
		}
	}
}

// relayBound is the promise for one token of an engine that computes in batches, on a
// machine without other load.
const relayBound = 25 * time.Microsecond

func benchRelay(b *testing.B, kind string, together bool) {
	busy, known := hostLoad()
	const streams, tokens, pace = 100, 100, 20 * time.Millisecond
	dir := b.TempDir()
	workers := startWorker(b, filepath.Join(dir, "egress"), tokens, newSteps(b, pace, together))
	defer workers.Close()
	cmd, stdin, client := startRelay(b, dir, "-relay-kind="+kind)
	if err := readStream(client, tokens); err != nil { // the first one is dear
		b.Fatal(err)
	}
	before := usageOf(b, cmd.Process.Pid)
	total := 0
	for b.Loop() {
		var wg sync.WaitGroup
		for range streams {
			wg.Go(func() {
				if err := readStream(client, tokens); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		total += streams * tokens
	}
	used := usageOf(b, cmd.Process.Pid).less(before)
	used.report(b, "", total)
	b.ReportMetric(busy, "load-avg")
	b.ReportMetric(0, "ns/op") // the pace's, not the relay's
	if idle := known && busy < float64(runtime.NumCPU()); idle && kind == kindRelay && together && used.cpu > time.Duration(total)*relayBound {
		b.Errorf("the relay took %v per token, want at most %v", used.cpu/time.Duration(total), relayBound)
	}
	client.CloseIdleConnections()
	_ = stdin.Close()
	if err := cmd.Wait(); err != nil {
		b.Fatalf("%s process: %v", kind, err)
	}
}

// steps says when the next token is due.
type steps struct {
	pace time.Duration
	next atomic.Pointer[chan struct{}] // closed at the next step of all streams; nil gives each its own
}

func newSteps(b *testing.B, pace time.Duration, together bool) *steps {
	s := &steps{pace: pace}
	if !together {
		return s
	}
	first := make(chan struct{})
	s.next.Store(&first)
	tick := time.NewTicker(pace)
	b.Cleanup(tick.Stop)
	go func() {
		for range tick.C {
			next := make(chan struct{})
			close(*s.next.Swap(&next))
		}
	}()
	return s
}

// stream returns what waits for the next token of one stream, and what ends that.
func (s *steps) stream() (wait, stop func()) {
	if s.next.Load() != nil {
		return func() { <-*s.next.Load() }, func() {}
	}
	tick := time.NewTicker(s.pace)
	return func() { <-tick.C }, tick.Stop
}

// startRelay runs a relay until stdin is closed. The client speaks to it as Envoy does.
func startRelay(t testing.TB, dir string, flags ...string) (cmd *exec.Cmd, stdin io.Closer, client *http.Client) {
	t.Helper()
	cmd = exec.Command(os.Args[0], append([]string{"-test.run=^TestRelayProcess$", "-relay-dir=" + dir}, flags...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "serving\n" {
		t.Fatalf("relay process: %q, %v", line, err)
	}
	return cmd, in, &http.Client{Transport: &http.Transport{
		Protocols: h2c(),
		HTTP2:     &http.HTTP2Config{MaxReceiveBufferPerStream: 256 << 10},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "relay"))
		},
	}}
}

func h2c() *http.Protocols {
	p := &http.Protocols{}
	p.SetUnencryptedHTTP2(true)
	return p
}

// startWorker serves streams of that many tokens.
func startWorker(b *testing.B, sock string, tokens int, pace *steps) *http.Server {
	b.Helper()
	lis, err := net.Listen("unix", sock)
	if err != nil {
		b.Fatal(err)
	}
	chunk := func(finish string) string {
		return `data: {"id":"cmpl-UFCLIUMNLW4VMVSQ5MQO4Q2E6C","object":"text_completion","created":1795982664,"model":"gemma-3-270m","system_fingerprint":"f1-6693b6c9",` +
			`"choices":[{"token_ids":[2364],"index":0,"text":" the","logprobs":null,"finish_reason":` + finish + "}]}\n\n"
	}
	token, last := chunk("null"), chunk(`"length"`)+"data: [DONE]\n\n"
	srv := &http.Server{Protocols: h2c(), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 1000}}
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set(names.Upstream, r.Header.Get(names.Destination))
		w.Header().Set(names.Worker, r.Header.Get(names.ExpectWorker))
		rc := http.NewResponseController(w)
		wait, stop := pace.stream()
		defer stop()
		for range tokens - 1 {
			_, _ = io.WriteString(w, token)
			_ = rc.Flush()
			wait()
		}
		_, _ = io.WriteString(w, last)
	})
	go func() { _ = srv.Serve(lis) }()
	return srv
}

func readStream(c *http.Client, tokens int) error {
	resp, err := ask(context.Background(), c)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if n := strings.Count(string(body), "data: "); n != tokens+1 {
		return fmt.Errorf("status %d, %d events, want %d", resp.StatusCode, n, tokens+1)
	}
	return nil
}
