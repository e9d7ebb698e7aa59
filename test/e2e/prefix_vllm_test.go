package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// publishing starts a vLLM that tells of its prefix cache, at an address that is returned.
func publishing(t *testing.T, python, model string) (u *upstream, at, replay string) {
	t.Helper()
	// At a tcp address without a * vLLM would connect, and not listen.
	dir := t.TempDir()
	at, replay = "ipc://"+dir+"/events", "ipc://"+dir+"/replay"
	u = &upstream{upstreamKind: upstreamKind{name: "vLLM", command: func(_ *testing.T, port string) *exec.Cmd {
		cmd := exec.Command(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "gemma", "--host", "127.0.0.1", "--port", port,
			"--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--block-size", "32", "--enable-prefix-caching", "--enable-prompt-tokens-details",
			"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":"kv@gemma"}`, at, replay))
		cmd.Env = append(os.Environ(), "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1")
		return cmd
	}}}
	u.start(t)
	return u, at, replay
}

// chat has a long system prompt and a question answered. It returns who did, and how many tokens
// vLLM had not to compute.
func (f *followed) chat(system string) (worker string, cached int) {
	f.Helper()
	f.idle()
	time.Sleep(1500 * time.Millisecond) // what a listed server says of its load is up to a second old
	f.asked++
	body, err := json.Marshal(map[string]any{"model": "gemma", "max_tokens": 4, "messages": []any{
		map[string]any{"role": "system", "content": system}, map[string]any{"role": "user", "content": fmt.Sprint("Question ", f.asked)},
	}})
	if err != nil {
		f.Fatal(err)
	}
	resp, err := http.Post(f.openai+"/chat/completions", "application/json", strings.NewReader(string(body)))
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != http.StatusOK {
		f.Fatalf("%s: %v", resp.Status, err)
	}
	worker = resp.Header.Get(names.Worker)
	f.Logf("%s had %d of %d tokens cached", worker, answer.Usage.Details.Cached, answer.Usage.Prompt)
	return worker, answer.Usage.Details.Cached
}

// TestEventsVLLM: the gateway follows the KV events of a real vLLM, which KVMESH_VLLM and
// KVMESH_VLLM_MODEL name: `make e2e-vllm-events`. Beside it stands another server, as good but for
// that nobody tells what it holds: it is another way to the same vLLM, which takes minutes to start. What is known
// goes to the first, which has it in its prefix cache; what is not goes to either.
func TestEventsVLLM(t *testing.T) {
	python, model := os.Getenv("KVMESH_VLLM"), os.Getenv("KVMESH_VLLM_MODEL")
	if python == "" || model == "" {
		t.Skip("not asked for: KVMESH_VLLM and KVMESH_VLLM_MODEL name no vLLM and model (make e2e-vllm-events)")
	}
	u, at, replay := publishing(t, python, model)
	to, err := url.Parse(u.base)
	if err != nil {
		t.Fatal(err)
	}
	way := httptest.NewServer(httputil.NewSingleHostReverseProxy(to))
	t.Cleanup(way.Close)
	m := testmesh.StartPolicy(t, bin, fmt.Sprintf(`apiVersion: kvmesh.io/v1alpha1
kind: Mesh
spec:
  kv:
    events:
    - {address: %q, replay: %q, topic: kv@, workers: [told]}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: vllm}
spec:
  engine: openai
  model: gemma
  static:
  - {id: told, url: %q}
  - {id: untold, url: %q}
`, at, replay, u.base, way.URL))
	f := &followed{T: t, openai: m.OpenAI, gateway: m.Gateway(t), pool: "vllm"}
	testmesh.Eventually(t, "it is followed", time.Minute, func() bool { return f.metric("kvmesh_kv_events_connected") == 1 })

	first := map[string]int{}
	for n := range 3 {
		system := strings.Repeat(fmt.Sprintf("You are assistant %d of this house, and polite. ", n), 24)
		told, blocks := f.metric(`kvmesh_prompts_asked_total{result="told"`), f.blocks(at)
		worker, _ := f.chat(system)
		first[worker]++
		testmesh.Eventually(t, "its tokens and blocks are known", time.Minute, func() bool {
			return f.metric(`kvmesh_prompts_asked_total{result="told"`) > told && f.blocks(at) > blocks
		})
		for range 3 {
			if got, cached := f.chat(system); got != "told" || cached == 0 {
				t.Errorf("%s answered, with %d tokens cached", got, cached)
			}
		}
	}
	if n := f.metric("kvmesh_prefix_requests_total"); n < 9 {
		t.Errorf("%v of 9 requests went where their beginning is", n)
	}
	t.Logf("unknown prompts went %v; %v blocks are known, orphans %v, nameless %v, wrong %v", first, f.blocks(at),
		f.metric("kvmesh_kv_events_orphans"), f.metric("kvmesh_kv_events_nameless"), f.metric("kvmesh_kv_events_wrong"))

	if err := syscall.Kill(-u.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testmesh.Eventually(t, "nothing is known of what is gone", time.Minute, func() bool { return f.blocks(at) == 0 })
}
