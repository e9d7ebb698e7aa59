package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// server is an OpenAI-compatible server of the model "m" in a process of its own.
type server struct {
	name string
	base string
	best float64 // tokens/s of its best turn
}

// startServer runs a command, in whose arguments ADDR and PORT stand for the address,
// until the benchmark ends, and waits until it can answer.
func startServer(b *testing.B, name, path string, args ...string) *server {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close() // taken again by the server a moment later
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		b.Fatal(err)
	}
	for i, a := range args {
		args[i] = strings.ReplaceAll(strings.ReplaceAll(a, "ADDR", addr), "PORT", port)
	}
	log := &testmesh.Log{}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if b.Failed() {
			b.Logf("%s:\n%s", name, log)
		}
	})
	s := &server{name: name, base: "http://" + addr}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if n, err := s.ask("warm up", 1); err == nil && n == 1 {
			return s
		} else if time.Now().After(deadline) {
			b.Fatalf("%s does not answer: %d tokens, %v\n%s", name, n, err, log)
		}
	}
}

// ask streams an answer and returns how many tokens it had, by the usage at its end.
func (s *server) ask(prompt string, tokens int) (int, error) {
	raw, err := json.Marshal(map[string]any{
		"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true,
		"stream_options": map[string]any{"include_usage": true}, "cache_prompt": false,
	})
	if err != nil {
		return 0, err
	}
	resp, err := http.Post(s.base+"/v1/completions", "application/json", bytes.NewReader(raw))
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return 0, fmt.Errorf("%s: %s: %s", s.name, resp.Status, text)
	}
	n := 0
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		var ev struct {
			Usage *struct {
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		data, ok := strings.CutPrefix(sc.Text(), "data: {")
		if ok && json.Unmarshal([]byte("{"+data), &ev) == nil && ev.Usage != nil {
			n = ev.Usage.CompletionTokens
		}
	}
	return n, sc.Err()
}

// eight has it answer eight prompts at once and returns the tokens/s of all.
func (s *server) eight(b *testing.B, round, tokens int) float64 {
	b.Helper()
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range 8 {
		// The number keeps a prompt from being found in a cache.
		prompt := fmt.Sprintf("%d-%d. The quick brown fox jumps over the lazy dog, and then it goes on to", round, i)
		wg.Go(func() {
			if n, err := s.ask(prompt, tokens); err != nil || n != tokens {
				b.Errorf("%s: %d tokens, %v", s.name, n, err)
			}
		})
	}
	wg.Wait()
	return float64(8*tokens) / time.Since(begin).Seconds()
}

// BenchmarkServers puts a worker with the engine llamacpp beside llama.cpp's own server,
// each a process over HTTP with one thread: the same model, the same eight prompts at
// once, turn by turn in the same run, prompts included in the time. llama-server is the
// one that KVMESH_LLAMA_SERVER names; scripts/llama-server.sh builds one.
func BenchmarkServers(b *testing.B) {
	const tokens, rounds = 32, 4
	path := os.Getenv("KVMESH_LLAMA_SERVER")
	if path == "" {
		b.Skip("KVMESH_LLAMA_SERVER names no llama-server (scripts/llama-server.sh)")
	}
	lib, model := filepath.Join(testmesh.Root(), ".tools", "llama"), filepath.Join(testmesh.Root(), ".tools", "model.gguf")
	for _, file := range []string{path, lib, model} {
		if _, err := os.Stat(file); err != nil {
			b.Skipf("missing: %v (make tools)", err)
		}
	}
	bin, err := testmesh.Build(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	servers := []*server{
		startServer(b, "worker", bin, "worker", "--id", "w", "--listen", "ADDR", "--model", "m", "--llama-lib", lib, "--weights", model,
			"--context-length", "256", "--kv-tokens", "2048", "--max-num-seqs", "8", "--threads", "1", "--self-check", "0"),
		startServer(b, "llama-server", path, "-m", model, "--alias", "m", "--host", "127.0.0.1", "--port", "PORT", "-t", "1", "-tb", "1",
			"--parallel", "8", "-c", "2048", "-kvu", "--swa-full", "--no-ui", "--cache-ram", "0"),
	}
	round := 0
	for b.Loop() {
		for range rounds {
			for _, s := range servers {
				s.best = max(s.best, s.eight(b, round, tokens))
			}
			round++
		}
	}
	for _, s := range servers {
		b.ReportMetric(s.best, s.name+"-tokens/s")
	}
	b.ReportMetric(100*servers[0].best/servers[1].best, "%ofllama-server")
}
