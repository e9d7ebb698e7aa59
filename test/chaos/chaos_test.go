package chaos

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

var (
	chaosFor  = flag.Duration("chaos-for", 20*time.Second, "how long the faults go on")
	chaosSeed = flag.Uint64("chaos-seed", 0, "seed of the schedule; 0 takes one and says which")
)

const policyFile = `
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
metadata: {name: chaos}
spec: {defaultPool: sim}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec:
  engine: sim
  model: sim-1
  local: [{id: near-1, zone: a}, {id: near-2, zone: a}, {id: near-3, zone: b}]
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: sim}
spec:
  models: [sim-1]
  tiers: [{pool: sim}]
  stream: {moves: 50, wait: 60s}
`

// chaos is one run.
type chaos struct {
	t       *testing.T
	m       *testmesh.Mesh
	api     *fleet.Client
	gateway string                // its URL
	lines   map[string][]*trouble // of the workers that are not on this machine
	far     map[string]*exec.Cmd

	mu      sync.Mutex
	answers int
	wrong   []wrong
	faults  map[string]int // how often each was, but for those of lines
}

func TestChaos(t *testing.T) {
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64N(1 << 32)
	}
	t.Logf("seed %d", seed)
	dir := t.TempDir()
	bin, err := testmesh.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := &chaos{t: t, m: testmesh.StartPolicy(t, bin, policyFile), lines: map[string][]*trouble{}, far: map[string]*exec.Cmd{}, faults: map[string]int{}}
	c.api, c.gateway = fleet.NewClient(c.m.API), c.m.Gateway(t)
	c.startFar(bin, "far-1", c.proxied())
	c.startFar(bin, "far-2", c.elsewhere())
	testmesh.Eventually(t, "five workers to be healthy", 30*time.Second, func() bool { return c.healthy() == 5 })
	want := c.references()
	ctx, cancel := context.WithTimeout(t.Context(), *chaosFor)
	defer cancel()
	var clients, faults sync.WaitGroup
	for i := range 16 {
		clients.Go(func() { c.client(ctx, rand.New(rand.NewPCG(seed, uint64(i))), want) })
	}
	for i := range 2 { // at most two faults at a time
		faults.Go(func() { c.harm(ctx, seed, i) })
	}
	faults.Wait()
	clients.Wait()
	alone := 0
	for _, w := range c.wrong {
		line := c.access(w.request)
		if line != "" && !strings.Contains(line, `"cluster":"relay"`) {
			alone++
			t.Logf("unprotected: %s\n%s", w.what, line)
			continue
		}
		t.Errorf("%s\n%s", w.what, line)
	}
	moves := c.moves()
	t.Logf("seed %d: %d answers, %d wrong; %d broke that had not gone through the relay, for ext_proc was too slow; faults %v; %d moves", seed, c.answers, len(c.wrong)-alone, alone, c.faults, moves)
	c.report()
	if alone*200 > c.answers {
		t.Errorf("%d of %d answers broke unprotected", alone, c.answers)
	}
	if c.answers == 0 || moves == 0 {
		t.Errorf("%d answers and %d moves: nothing was shown", c.answers, moves)
	}
}

// startFar starts a worker behind a line that can fail.
func (c *chaos) startFar(bin, id string, at site) {
	c.t.Helper()
	c.lines[id] = at.troubles
	cmd := at.command(bin, "worker", "--id", id, "--zone", "far", "--pool", "sim", "--engine", "sim", "--model", "sim-1", "--max-num-seqs", "64",
		"--listen", at.listen, "--advertise", at.advertise, "--control-plane", at.api,
		"--kv-dir", c.m.KVDir(), "--relay-secret-file", filepath.Join(c.m.RunDir(c.t), "relay.secret"))
	cmd.Stderr = c.m.Log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended by itself
		_ = cmd.Wait()
	})
	c.far[id] = cmd
}

func (c *chaos) healthy() (n int) {
	list, err := c.api.Workers(c.t.Context())
	if err != nil {
		return 0
	}
	for _, w := range list {
		if w.Status == "HEALTHY" {
			n++
		}
	}
	return n
}

// prompts is how many different questions are asked.
const prompts = 20

// body asks question n; the same question has the same answer whenever it is asked.
func body(n int, stream bool) string {
	return fmt.Sprintf(`{"model":"sim-1","prompt":"question %d","max_tokens":%d,"stream":%v,"ignore_eos":true,"temperature":%d,"seed":%d,"sim":{"itl_ms":20}}`,
		n, 40+10*n, stream, n%2, n)
}

// references are the undisturbed answers.
func (c *chaos) references() []string {
	c.t.Helper()
	out := make([]string, prompts)
	var wg sync.WaitGroup
	for n := range out {
		wg.Go(func() {
			text, _, err := c.ask(c.t.Context(), n, n%2 == 0)
			if err != nil {
				c.t.Errorf("undisturbed answer %d: %v", n, err)
			}
			out[n] = text
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
	return out
}

// client asks one question after the other and holds each answer against the
// undisturbed one.
func (c *chaos) client(ctx context.Context, r *rand.Rand, want []string) {
	for ctx.Err() == nil {
		n, stream := r.IntN(prompts), r.IntN(4) > 0
		begin := time.Now()
		// An answer that has begun is waited for, also past the end of the faults.
		text, request, err := c.ask(context.WithoutCancel(ctx), n, stream)
		if err == nil && text != want[n] {
			same := 0
			for same < min(len(text), len(want[n])) && text[same] == want[n][same] {
				same++
			}
			err = fmt.Errorf("differs from the undisturbed answer at byte %d of %d:\n%q\n%q", same, len(want[n]), text[max(0, same-20):], want[n][max(0, same-20):])
		}
		c.mu.Lock()
		c.answers++
		if err != nil {
			c.wrong = append(c.wrong, wrong{fmt.Sprintf("question %d, stream %v, asked at %s: %v", n, stream, begin.Format("15:04:05.000"), err), request})
		}
		c.mu.Unlock()
	}
}

// wrong is an answer that is not as it should be.
type wrong struct {
	what    string
	request string // its id, "" where no head of an answer came
}

// access is Envoy's line about a request. One that ext_proc does not answer for in time
// takes the default route, straight to a worker, and nobody goes on with its answer.
func (c *chaos) access(request string) string {
	if request == "" {
		return ""
	}
	data, err := os.ReadFile(filepath.Join(c.m.Dir, ".kvmesh", "logs", "access.log"))
	if err != nil {
		c.t.Error(err)
	}
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, request) {
			return line
		}
	}
	return ""
}

// ask returns the text of an answer that is complete, and the request's id.
func (c *chaos) ask(ctx context.Context, n int, stream bool) (text, request string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.m.OpenAI+"/completions", strings.NewReader(body(n, stream)))
	if err != nil {
		return "", "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	text, err = read(resp, stream)
	return text, resp.Header.Get("X-Request-Id"), err
}

// read returns the text of a complete answer.
func read(resp *http.Response, stream bool) (string, error) {
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // only for the message
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	if !stream {
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			return "", err
		}
		return add("", raw)
	}
	text := ""
	for events := openai.NewEventReader(resp.Body, 1<<20); ; {
		ev, err := events.Next()
		switch {
		case err != nil:
			return text, fmt.Errorf("after %d bytes: %w", len(text), err)
		case ev.Done():
			return text, nil
		case ev.Data != nil:
			if text, err = add(text, ev.Data); err != nil {
				return text, err
			}
		}
	}
}

// add adds an event's text, or a whole answer's.
func add(text string, data []byte) (string, error) {
	var v struct {
		Choices []struct{ Text string }
		Error   *struct{ Message string }
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return text, fmt.Errorf("%q: %w", data, err)
	}
	if v.Error != nil {
		return text, fmt.Errorf("error event after %d bytes: %s", len(text), v.Error.Message)
	}
	for _, ch := range v.Choices {
		text += ch.Text
	}
	return text, nil
}

// page is what the gateway says at a path.
func (c *chaos) page(path string) ([]byte, error) {
	resp, err := http.Get(c.gateway + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// moves is how often answers moved.
func (c *chaos) moves() (n int) {
	page, err := c.page("/metrics")
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "kvmesh_relay_moves_total{") {
			var k int
			if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &k); err == nil {
				n += k
			}
		}
	}
	return n
}

// under are the ids of the answers that are under way at a worker.
func (c *chaos) under(worker string) (ids []string) {
	var list fleet.StreamList
	page, err := c.page("/v1/streams")
	if err == nil {
		err = json.Unmarshal(page, &list)
	}
	if err != nil {
		c.t.Errorf("what is under way at %s: %v", worker, err)
	}
	for _, s := range list.Streams {
		if s.Worker == worker {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

// harm does the faults of a lane, one after the other.
func (c *chaos) harm(ctx context.Context, seed uint64, lane int) {
	for e := range schedule(seed, lane) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(e.pause):
		}
		c.do(e)
	}
}

// do does a fault and takes it back.
func (c *chaos) do(e event) {
	name := ""
	switch e.fault {
	case kill:
		name = "kill"
		c.signal(e.worker, syscall.SIGKILL) // `up` starts it again
		time.Sleep(e.length)
	case stop:
		name = "stop"
		c.signal(e.worker, syscall.SIGSTOP)
		time.Sleep(e.length)
		c.signal(e.worker, syscall.SIGCONT)
	case drain:
		name = "drain"
		if err := c.api.Drain(context.Background(), e.worker, true); err != nil {
			name = "drain refused" // it is being started, or the control plane is
			break
		}
		time.Sleep(e.length)
		for i := 0; c.api.Drain(context.Background(), e.worker, false) != nil && i < 100; i++ {
			time.Sleep(100 * time.Millisecond)
		}
	case control:
		name = "control plane killed"
		c.signal("controlplane", syscall.SIGKILL)
		time.Sleep(e.length)
	default:
		all := c.lines[e.worker]
		all[int(e.fault-line)%len(all)].run(e.length, func() []string { return c.under(e.worker) })
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults[name]++
}

// signal sends a signal to a part that runs.
func (c *chaos) signal(part string, s syscall.Signal) {
	pid := c.m.PID(part)
	if far := c.far[part]; far != nil {
		pid = far.Process.Pid
	}
	if pid > 0 {
		_ = syscall.Kill(pid, s) // it may have ended in this moment
	}
}
