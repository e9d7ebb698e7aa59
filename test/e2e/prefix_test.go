package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/extproc"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// followed is a mesh whose gateway follows what its workers hold.
type followed struct {
	*testing.T
	openai  string // the mesh's
	gateway string // of its own pages
	pool    string // the workers that are compared
	asked   int
}

// idle waits until the gateway sees nobody at work, and the workers as equals but for what they hold.
func (f *followed) idle() {
	f.Helper()
	testmesh.Eventually(f, "the workers are idle and equal", time.Minute, func() bool {
		resp, err := http.Get(f.gateway + "/health")
		if err != nil {
			f.Fatal(err)
		}
		defer resp.Body.Close()
		var health extproc.Health
		if err := json.NewDecoder(resp.Body).Decode(&health); err != nil {
			f.Fatal(err)
		}
		least, most := uint32(1<<31), uint32(0)
		for _, w := range health.Workers {
			if w.Pool != f.pool {
				continue
			}
			if !w.Active || w.InFlight > 0 || w.Running+w.Waiting > 0 || w.Broken {
				return false
			}
			least, most = min(least, w.Weight), max(most, w.Weight)
		}
		return most <= least+least/4
	})
}

// ask asks for a prompt that begins so, and no two prompts are the same. It returns who answered.
func (f *followed) ask(begin string) string {
	f.Helper()
	f.idle()
	f.asked++
	body, err := json.Marshal(map[string]any{"model": "gemma", "prompt": fmt.Sprint(begin, " question ", f.asked), "max_tokens": 4})
	if err != nil {
		f.Fatal(err)
	}
	resp, err := http.Post(f.openai+"/completions", "application/json", strings.NewReader(string(body)))
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	if answer, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		f.Fatalf("%s %v\n%s", resp.Status, err, answer)
	}
	return resp.Header.Get(names.Worker)
}

// metric is the sum of the gateway's samples whose name begins so.
func (f *followed) metric(prefix string) float64 {
	f.Helper()
	return metricAt(f, f.gateway+"/metrics", prefix)
}

// blocks is how many blocks are known of a publisher.
func (f *followed) blocks(address string) float64 {
	f.Helper()
	return f.metric(`kvmesh_kv_events_blocks{address="` + address)
}

// teach asks for a prompt that is not known until a worker other than not has it, its tokens are
// known, and its publisher has told of them. It returns the prompt's beginning and the worker.
func (f *followed) teach(not string, at map[string]string) (begin, worker string) {
	f.Helper()
	for try := range 20 {
		begin = strings.Repeat(fmt.Sprintf("a river of light in valley %d ", 1000*f.asked+try), 150)
		told, before := f.metric(`kvmesh_prompts_asked_total{result="told"`), map[string]float64{}
		for w, address := range at {
			before[w] = f.blocks(address)
		}
		if worker = f.ask(begin); worker == not {
			continue
		}
		testmesh.Eventually(f, "its tokens are known and its blocks told of", time.Minute, func() bool {
			return f.metric(`kvmesh_prompts_asked_total{result="told"`) > told && f.blocks(at[worker]) >= before[worker]+15
		})
		return begin, worker
	}
	f.Fatalf("no prompt went to a worker other than %s", not)
	return "", ""
}

// stays asks for a prompt again, a few times, each time of the worker that holds it.
func (f *followed) stays(begin, worker string) {
	f.Helper()
	before := f.metric("kvmesh_prefix_requests_total")
	for range 6 {
		if got := f.ask(begin); got != worker {
			f.Errorf("%s answered what %s holds", got, worker)
		}
	}
	if n := f.metric("kvmesh_prefix_requests_total") - before; n != 6 {
		f.Errorf("%v of 6 requests count as such whose worker holds their beginning", n)
	}
}

// nonsense serves everybody who connects with what is no ZeroMQ, or stops in its middle.
func nonsense(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				// A greeting, and then frames of any length.
				greeting := append([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL"), make([]byte, 48)...)
				_, _ = c.Write(greeting[:64-n%2]) // it may be cut off
				_, _ = c.Write([]byte(strings.Repeat("\x02\xff\xff\xff\xff\xff\xff\xff\xff\x00", 1000)))
			}()
		}
	}()
	return "tcp://" + l.Addr().String()
}

// TestPrefixRouting: the gateway follows what the KV nodes of two hosts tell. A request goes to the
// worker that holds the beginning of its prompt; when a node is killed that ends, and nothing else
// does, and it begins again with another node; and a publisher that tells nonsense disturbs nobody.
func TestPrefixRouting(t *testing.T) {
	at, replay, nodes := map[string]string{}, map[string]string{}, map[string]*kvNode{}
	node := func(id string) *kvNode {
		return startNode(t, "--events", at[id], "--events-replay", replay[id], "--events-token-ids")
	}
	policy := []string{"apiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec:\n  kv:\n    events:"}
	for _, id := range []string{"one", "two"} {
		at[id], replay[id] = "tcp://"+freeAddr(t), "tcp://"+freeAddr(t)
		nodes[id] = node(id)
		policy = append(policy, fmt.Sprintf("    - {address: %q, replay: %q, workers: [%s]}", at[id], replay[id], id))
	}
	policy = append(policy, fmt.Sprintf("    - {address: %q, workers: [one, two]}", nonsense(t)), "---", strings.Replace(joined, "engine: llamacpp", "engine: sim", 1))
	m := testmesh.StartPolicy(t, bin, strings.Join(policy, "\n"))
	f := &followed{T: t, openai: m.OpenAI, gateway: m.Gateway(t), pool: "gemma"}
	for id, n := range nodes {
		simProcess(t, id, "--pool", "gemma", "--control-plane", m.API, "--relay-secret-file", filepath.Join(m.RunDir(t), "relay.secret"), "--kv-node", n.dir)
	}
	healthy := func() bool {
		n := 0
		for _, w := range m.Workers(t) {
			if w.Pool == "gemma" && w.Status == "HEALTHY" {
				n++
			}
		}
		return n == 2 && f.metric("kvmesh_kv_events_connected") == 2
	}
	testmesh.Eventually(t, "both workers serve and both nodes are followed", time.Minute, healthy)

	first, one := f.teach("", at)
	second, two := f.teach(one, at)
	f.stays(first, one)
	f.stays(second, two)

	nodes[one].lose() // SIGKILL
	testmesh.Eventually(t, "nothing is known of a node that is gone", time.Minute, func() bool { return f.blocks(at[one]) == 0 })
	seen := map[string]int{}
	for range 10 {
		seen[f.ask(first)]++
	}
	t.Logf("without the node of %s its prompt went %v", one, seen)
	f.stays(second, two)

	nodes[one] = node(one)
	testmesh.Eventually(t, "the new node is followed", time.Minute, func() bool { return f.metric("kvmesh_kv_events_connected") == 2 })
	f.stays(second, two)
	if n := f.metric("kvmesh_kv_events_resets_total"); n < 4 {
		t.Errorf("%v resets are counted", n)
	}
}
