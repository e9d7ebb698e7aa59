package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// publishing begins to start a vLLM that tells of its prefix cache, at an address that is returned.
func publishing(t *testing.T, python, model string) (u *upstream, at, replay string, ready func()) {
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
	return u, at, replay, u.begin(t)
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

// TestEventsVLLM: the gateway follows the KV events of two real vLLMs, which KVMESH_VLLM and
// KVMESH_VLLM_MODEL name: `make e2e-vllm-events`. What one of them has in its prefix cache goes there,
// and it has to compute the rest only; when it is killed the other one serves.
func TestEventsVLLM(t *testing.T) {
	python, model := os.Getenv("KVMESH_VLLM"), os.Getenv("KVMESH_VLLM_MODEL")
	if python == "" || model == "" {
		t.Skip("not asked for: KVMESH_VLLM and KVMESH_VLLM_MODEL name no vLLM and model (make e2e-vllm-events)")
	}
	servers, at, begun := map[string]*upstream{}, map[string]string{}, []func(){}
	mesh := []string{"apiVersion: kvmesh.io/v1alpha1", "kind: Mesh", "spec:", "  kv:", "    events:"}
	pool := []string{"---", "apiVersion: kvmesh.io/v1alpha1", "kind: WorkerPool", "metadata: {name: vllm}", "spec:", "  engine: openai", "  model: gemma", "  static:"}
	for _, id := range []string{"one", "two"} {
		u, events, replay, ready := publishing(t, python, model)
		servers[id], at[id], begun = u, events, append(begun, ready)
		mesh = append(mesh, fmt.Sprintf("    - {address: %q, replay: %q, topic: kv@, workers: [%s]}", events, replay, id))
		pool = append(pool, fmt.Sprintf("  - {id: %s, url: %q}", id, u.base))
	}
	for _, ready := range begun {
		ready()
	}
	m := testmesh.StartPolicy(t, bin, strings.Join(append(mesh, pool...), "\n")+"\n")
	f := &followed{T: t, openai: m.OpenAI, gateway: m.Gateway(t), pool: "vllm"}
	testmesh.Eventually(t, "both are followed", time.Minute, func() bool { return f.metric("kvmesh_kv_events_connected") == 2 })

	holder := map[string]string{}
	for n := 0; len(holder) < 2 && n < 10; n++ {
		system := strings.Repeat(fmt.Sprintf("You are assistant %d of this house, and polite. ", n), 24)
		told := f.metric(`kvmesh_prompts_asked_total{result="told"`)
		worker, _ := f.chat(system)
		testmesh.Eventually(t, "its tokens and blocks are known", time.Minute, func() bool {
			return f.metric(`kvmesh_prompts_asked_total{result="told"`) > told && f.blocks(at[worker]) > 0
		})
		if holder[worker] == "" {
			holder[worker] = system
		}
	}
	for worker, system := range holder {
		for range 4 {
			if got, cached := f.chat(system); got != worker || cached == 0 {
				t.Errorf("%s answered what %s holds, %d tokens were cached", got, worker, cached)
			}
		}
	}
	if n := f.metric("kvmesh_prefix_requests_total"); len(holder) != 2 || n < 8 {
		t.Errorf("%d servers hold something; %v requests went where their beginning is", len(holder), n)
	}
	t.Logf("blocks known: %v of one, %v of two; orphans %v, nameless %v, wrong %v", f.blocks(at["one"]), f.blocks(at["two"]),
		f.metric("kvmesh_kv_events_orphans"), f.metric("kvmesh_kv_events_nameless"), f.metric("kvmesh_kv_events_wrong"))

	if err := syscall.Kill(-servers["one"].cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testmesh.Eventually(t, "nothing is known of what is gone", time.Minute, func() bool { return f.blocks(at["one"]) == 0 })
	for range 3 {
		f.pool = "" // one of them is not active
		if got, _ := f.chat(holder["one"]); got != "two" {
			t.Errorf("%q answered in place of the dead one", got)
		}
	}
}
