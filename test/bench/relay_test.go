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
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/relay"
)

// relaySecret makes the benchmark's workers ours, whose answers the relay can move.
const relaySecret = "secret"

// relayDir makes TestRelayProcess the process that is measured.
var relayDir = flag.String("relay-dir", "", "folder of the sockets of a relay to run until stdin ends")

// TestRelayProcess runs a relay in a process of its own, so that its CPU time can
// be told from the client's and the worker's. Alone it does nothing.
func TestRelayProcess(t *testing.T) {
	if *relayDir == "" {
		t.Skip("is the child process of BenchmarkRelay")
	}
	p := newParts(t, 3)
	r, err := relay.New(relay.Config{
		Policy: p.set, Picker: p.pick, Held: p.held, Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler), Secret: relaySecret,
		DialEgress: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(*relayDir, "egress"))
		},
	})
	if err != nil {
		t.Fatal(err)
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
	if err := r.Run(ctx, lis); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkRelay measures the relay's own CPU time per token, with streams at the
// pace of a real model: 100 streams of 50 tokens per second.
func BenchmarkRelay(b *testing.B) {
	const streams, tokens, pace = 100, 100, 20 * time.Millisecond
	dir := b.TempDir()
	workers := startWorker(b, filepath.Join(dir, "egress"), tokens, pace)
	defer workers.Close()
	cmd, stdin, client := startRelay(b, dir)
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
	client.CloseIdleConnections()
	_ = stdin.Close()
	if err := cmd.Wait(); err != nil {
		b.Fatalf("relay process: %v", err)
	}
	cpu := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	b.ReportMetric(float64(cpu.Microseconds())/float64(total), "cpu-µs/token")
	b.ReportMetric(0, "ns/op") // the pace's, not the relay's
}

// startRelay runs a relay until stdin is closed. The client speaks to it as Envoy does.
func startRelay(t testing.TB, dir string) (cmd *exec.Cmd, stdin io.Closer, client *http.Client) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "-test.run=^TestRelayProcess$", "-relay-dir="+dir)
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

// startWorker serves streams of that many tokens at that pace.
func startWorker(b *testing.B, sock string, tokens int, pace time.Duration) *http.Server {
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
		rc := http.NewResponseController(w)
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for range tokens - 1 {
			_, _ = io.WriteString(w, token)
			_ = rc.Flush()
			<-tick.C
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
