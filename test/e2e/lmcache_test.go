package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// part is a process of kvmesh that is killed and started again.
type part struct {
	t    *testing.T
	args []string
	log  *testmesh.Log
	cmd  *exec.Cmd
}

// startPart starts one, until the test ends.
func startPart(t *testing.T, args ...string) *part {
	t.Helper()
	p := &part{t: t, args: args, log: &testmesh.Log{}}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("kvmesh %s:\n%s", args[0], p.log)
		}
	})
	return p
}

func (p *part) start() {
	p.t.Helper()
	p.cmd = exec.Command(bin, p.args...)
	p.cmd.Stderr = p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	reaper.Add(p.cmd.Process.Pid)
}

// kill kills it, if it runs.
func (p *part) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill() // fails only when it is gone
		_ = p.cmd.Wait()
		reaper.Remove(p.cmd.Process.Pid)
		p.cmd = nil
	}
}

// kvHost is a KV node and what serves it to engines.
type kvHost struct {
	node, srv *part
	socket    string // of the server
	tcp       string // likewise
	metrics   string
}

// startKVHost starts both, with chunks of so many tokens.
func startKVHost(t *testing.T, chunk int, args ...string) *kvHost {
	t.Helper()
	parent, err := os.MkdirTemp("/dev/shm", "kvmesh-e2e-")
	if err != nil {
		t.Skip("no shared memory: ", err)
	}
	t.Cleanup(func() { os.RemoveAll(parent) })
	dir := filepath.Join(parent, "node")
	h := &kvHost{socket: filepath.Join(dir, "lmcache.sock"), tcp: freeAddr(t), metrics: freeAddr(t)}
	h.node = startPart(t, "kvnode", "--dir", dir, "--limit", "268435456")
	h.await(t, filepath.Join(dir, "node.sock"))
	h.srv = startPart(t, append([]string{"lmcache", "--kv-node", dir, "--chunk", fmt.Sprint(chunk), "--metrics", h.metrics, "--listen", "unix:" + h.socket + "," + h.tcp}, args...)...)
	h.await(t, h.socket)
	t.Cleanup(func() { // the arena's second name, which a killed server leaves
		names, _ := filepath.Glob("/dev/shm/kvmesh-lmcache-*")
		h.node.kill()
		h.srv.kill()
		os.RemoveAll(parent)
		for _, name := range names {
			if st, err := os.Stat(name); err == nil && st.Sys().(*syscall.Stat_t).Nlink == 1 {
				os.Remove(name)
			}
		}
	})
	return h
}

// await waits until somebody listens on a socket.
func (h *kvHost) await(t *testing.T, socket string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("unix", socket); err == nil {
			c.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("nobody listens on %s", socket)
		}
	}
}

// freeAddr is a loopback address that is free now.
func freeAddr(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// lmcacheFiles are the Python with vLLM, its model, and where LMCache is installed.
func lmcacheFiles(t *testing.T) (python, model, site string) {
	t.Helper()
	python, model, site = os.Getenv("KVMESH_VLLM"), os.Getenv("KVMESH_VLLM_MODEL"), os.Getenv("KVMESH_LMCACHE")
	if python == "" || model == "" || site == "" {
		t.Skip("not asked for: KVMESH_VLLM, KVMESH_VLLM_MODEL and KVMESH_LMCACHE name no vLLM, model and LMCache (make e2e-vllm, make e2e-lmcache)")
	}
	return python, model, site
}

// TestLMCacheClient drives a node with LMCache's own client classes, over TCP and a Unix
// socket: test/clients/lmcache_client.py says what it does. Between its steps the node and
// the server are killed.
func TestLMCacheClient(t *testing.T) {
	python, _, site := lmcacheFiles(t)
	for name, url := range map[string]func(*kvHost) string{
		"tcp":  func(h *kvHost) string { return "grpc://" + h.tcp },
		"unix": func(h *kvHost) string { return "grpc+unix://" + h.socket },
	} {
		t.Run(name, func(t *testing.T) {
			h := startKVHost(t, 32, "--model", "tiny=sha256:0123")
			cmd := exec.Command(python, filepath.Join(testmesh.Root(), "test", "clients", "lmcache_client.py"), url(h))
			cmd.Env = append(os.Environ(), "PYTHONPATH="+site, "PYTHONNOUSERSITE=1", "OMP_NUM_THREADS=1")
			runClient(t, cmd, func(line string) bool { return h.obey(t, line) })
		})
	}
}

// runClient runs a client to its good end. Lines for which do says yes are answered, the
// others logged.
func runClient(t *testing.T, cmd *exec.Cmd, do func(string) bool) {
	t.Helper()
	log := &testmesh.Log{}
	cmd.Stderr = log
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaper.Add(cmd.Process.Pid)
	defer reaper.Remove(cmd.Process.Pid)
	limit := time.AfterFunc(10*time.Minute, func() { _ = cmd.Process.Kill() })
	defer limit.Stop()
	last := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if last = strings.TrimSpace(lines.Text()); do(last) {
			fmt.Fprintln(in, "done")
		} else {
			t.Log(last)
		}
	}
	if err := cmd.Wait(); err != nil || last != "passed" {
		t.Errorf("the client has ended: %v\n%s", err, log)
	}
}

// TestLMCacheRESP keeps values in a node with LMCache's native Redis client, which must not
// hang at what is not there.
func TestLMCacheRESP(t *testing.T) {
	python, _, site := lmcacheFiles(t)
	dir, addr := filepath.Join(t.TempDir(), "node"), freeAddr(t)
	t.Setenv("KVMESH_RESP_PASSWORD", "secret")
	h := &kvHost{node: startPart(t, "kvnode", "--dir", dir, "--limit", "67108864", "--resp", addr)}
	h.await(t, filepath.Join(dir, "node.sock"))
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, filepath.Join(testmesh.Root(), "test", "clients", "lmcache_resp.py"), host, port, "secret")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+site, "PYTHONNOUSERSITE=1", "OMP_NUM_THREADS=1")
	runClient(t, cmd, func(line string) bool {
		if line != "forget" {
			return false
		}
		h.node.kill()
		h.node.args[4] = "134217728" // begins anew
		h.node.start()
		h.await(t, filepath.Join(dir, "node.sock"))
		return true
	})
}

// obey does what a client's line asks for, if it does.
func (h *kvHost) obey(t *testing.T, line string) bool {
	t.Helper()
	switch line {
	case "kill node":
		h.node.kill()
	case "start node":
		h.node.start()
		h.await(t, filepath.Join(filepath.Dir(h.socket), "node.sock"))
	case "kill server":
		h.srv.kill()
	case "start server":
		h.srv.start()
		h.await(t, h.socket)
	case "forget":
		if err := os.Remove(filepath.Join(filepath.Dir(h.socket), "lmcache.json")); err != nil {
			t.Error(err)
		}
	default:
		return false
	}
	return true
}

// vllm is a running vLLM.
type vllm struct {
	*upstream
	t *testing.T
}

// startVLLM starts one, which keeps its KV in a node unless that is nil.
func startVLLM(t *testing.T, h *kvHost) *vllm {
	t.Helper()
	python, model, site := lmcacheFiles(t)
	k := upstreamKind{name: "vLLM", command: func(_ *testing.T, port string) *exec.Cmd {
		args := []string{
			"-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "gemma", "--host", "127.0.0.1", "--port", port,
			"--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--block-size", "32",
			"--enable-prefix-caching", "--enable-prompt-tokens-details",
		}
		if h != nil {
			args = append(args, "--kv-transfer-config", fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",
				"kv_connector_module_path":"lmcache.integration.vllm.lmcache_mp_connector","kv_load_failure_policy":"recompute",
				"kv_connector_extra_config":{"lmcache.mp.server_urls":"grpc+unix://%s","lmcache.mp.save_decode_cache":true,
				"lmcache.mp.mq_timeout":60,"lmcache.mp.heartbeat_interval":2,"lmcache.mp.mp_transfer_mode":"engine_driven"}}`, h.socket))
		}
		cmd := exec.Command(python, args...)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+site, "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
			"VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1")
		return cmd
	}}
	u := &upstream{upstreamKind: k}
	u.start(t)
	return &vllm{u, t}
}

// kill kills vLLM and all of its processes.
func (v *vllm) kill() {
	v.t.Helper()
	if err := syscall.Kill(-v.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		v.t.Fatal(err)
	}
}

// tokens is one answer: its tokens, and how many of the prompt were not computed.
type tokens struct {
	ids    []int
	prompt int
	cached int
}

// complete has vLLM generate, greedily, exactly most tokens after a prompt of token ids.
// each, if any, is told of each that comes, and ends the answer with false.
func (v *vllm) complete(prompt []int, most int, each func([]int) bool) (out tokens, err error) {
	body, err := json.Marshal(map[string]any{
		"model": "gemma", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": true, "stream": true, "return_token_ids": true,
		"stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return out, err
	}
	resp, err := http.Post(v.base+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return out, fmt.Errorf("status %s", resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var ev struct {
			Choices []struct {
				IDs []int `json:"token_ids"`
			} `json:"choices"`
			Usage *struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
		}
		if err := json.Unmarshal([]byte(data), &ev); err != nil {
			return out, fmt.Errorf("event %s: %w", data, err)
		}
		for _, c := range ev.Choices {
			out.ids = append(out.ids, c.IDs...)
		}
		if ev.Usage != nil {
			out.prompt, out.cached = ev.Usage.Prompt, ev.Usage.Details.Cached
		}
		if each != nil && !each(out.ids) {
			return out, nil
		}
	}
	if err := lines.Err(); err != nil {
		return out, err
	}
	if len(out.ids) != most {
		return out, fmt.Errorf("%d tokens of %d", len(out.ids), most)
	}
	return out, nil
}

// TestVLLMLMCache: unmodified vLLM keeps its KV in a node while it decodes; when it is
// killed, a fresh one goes on from there; and it lives and answers when the node is killed
// under load, and when what serves the node is killed.
func TestVLLMLMCache(t *testing.T) {
	lmcacheFiles(t)
	const most, killAt = 300, 250
	prompt := make([]int, 700)
	for i := range prompt {
		prompt[i] = 300 + i*7919%700
	}
	first := startVLLM(t, nil)
	want, err := first.complete(prompt, most, nil)
	if err != nil {
		t.Fatal(err)
	}
	first.kill()
	h := startKVHost(t, 32)
	second := startVLLM(t, h)
	part, err := second.complete(prompt, most, func(ids []int) bool {
		if len(ids) < killAt {
			return true
		}
		second.kill() // in the middle of its answer
		return false
	})
	if err != nil || !slices.Equal(part.ids, want.ids[:len(part.ids)]) {
		t.Fatalf("the disturbed answer is another one: %v\n%v\n%v", err, part.ids, want.ids)
	}
	third := startVLLM(t, h)
	so := len(part.ids)
	begin := time.Now()
	rest, err := third.complete(append(slices.Clone(prompt), part.ids...), most-so, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("killed after %d of %d tokens; a fresh process had %d of %d tokens cached (%.1f %%), and the other %d after %v",
		so, most, rest.cached, rest.prompt, 100*float64(rest.cached)/float64(rest.prompt), most-so, time.Since(begin).Round(time.Millisecond))
	if rest.cached*10 <= rest.prompt*9 {
		t.Errorf("%d of %d tokens were cached", rest.cached, rest.prompt)
	}
	if !slices.Equal(rest.ids, want.ids[so:]) {
		t.Errorf("it goes on with\n%v, want\n%v", rest.ids, want.ids[so:])
	}
	t.Run("node killed under load", func(t *testing.T) { third.nodeKilled(t, h) })
	t.Run("server killed", func(t *testing.T) { third.serverKilled(t, h, prompt, want) })
}

// nodeKilled kills the node over and over while streams run that store and read.
func (v *vllm) nodeKilled(t *testing.T, h *kvHost) {
	const kills = 10
	var stop atomic.Bool
	var done atomic.Int64
	var streams sync.WaitGroup
	for w := range 4 {
		streams.Go(func() {
			for n := 0; !stop.Load(); n++ {
				// Others begin as these do, so that there is something to read.
				prompt := make([]int, 400)
				for i := range prompt {
					prompt[i] = 300 + (i*31+(n%3)*(i/200)*7+w%2)%700
				}
				if _, err := v.complete(prompt, 40, nil); err != nil {
					t.Errorf("stream %d of %d: %v", n, w, err)
					return
				}
				done.Add(1)
			}
		})
	}
	for range kills {
		before := done.Load()
		for deadline := time.Now().Add(2 * time.Minute); done.Load() < before+2 && time.Now().Before(deadline) && !t.Failed(); {
			time.Sleep(50 * time.Millisecond)
		}
		h.node.kill()
		time.Sleep(500 * time.Millisecond) // streams go on meanwhile
		h.node.start()
		h.await(t, filepath.Join(filepath.Dir(h.socket), "node.sock"))
	}
	stop.Store(true)
	streams.Wait()
	t.Logf("%d answers while the node was killed %d times", done.Load(), kills)
	if resp, err := http.Get(v.base + "/health"); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("vLLM is not well: %v", err)
	}
	stored := metricAt(t, "http://"+h.metrics+"/metrics", "kvmesh_lmcache_stored_chunks_total")
	if stored == 0 || done.Load() < kills {
		t.Errorf("%v chunks were stored in %d answers: this shows nothing", stored, done.Load())
	}
}

// serverKilled kills what serves the node between two answers: the next one waits until it
// is back, and what was stored is found.
func (v *vllm) serverKilled(t *testing.T, h *kvHost, prompt []int, want tokens) {
	h.srv.kill()
	h.srv.start()
	got, err := v.complete(prompt, len(want.ids), nil)
	if err != nil || !slices.Equal(got.ids, want.ids) {
		t.Errorf("%v\n%v, want\n%v", err, got.ids, want.ids)
	}
	fresh := make([]int, 200)
	for i := range fresh {
		fresh[i] = 301 + i*37%600
	}
	before := metricAt(t, "http://"+h.metrics+"/metrics", "kvmesh_lmcache_stored_chunks_total")
	if _, err := v.complete(fresh, 10, nil); err != nil {
		t.Fatal(err)
	}
	if after := metricAt(t, "http://"+h.metrics+"/metrics", "kvmesh_lmcache_stored_chunks_total"); after-before < 6 {
		t.Errorf("%v chunks of 200 tokens were stored, want 6", after-before)
	}
}
