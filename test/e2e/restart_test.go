package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// restart runs `kvmesh restart` for a mesh.
func restart(m *testmesh.Mesh, args ...string) error {
	c := exec.Command(bin, append([]string{"restart"}, args...)...)
	c.Dir = m.Dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// The gateway and Envoy are replaced under 100 live streams and new requests beside
// them: none is cut, none fails, the last gateway shows and moves what the first one still
// carries, and the old processes end.
func TestPlannedRestart(t *testing.T) {
	m := testmesh.Start(t, bin, t.TempDir(), "-f", testmesh.Root()+"/examples/sim.yaml")
	before := m.Parts()
	load := m.StartLoad(10, mixed)
	const streams, tokens = 100, 80
	var long sync.WaitGroup
	var mu sync.Mutex
	done := 0
	for i := range streams {
		long.Go(func() {
			body := fmt.Sprintf(`{"model":"sim-1","prompt":"stream %d","max_tokens":%d,"stream":true,"sim":{"itl_ms":100}}`, i, tokens)
			text, err := answer(t, m, body)
			if err != nil || strings.Contains(text, `"error"`) || !strings.Contains(text, `"finish_reason":"length"`) || !strings.HasSuffix(text, "data: [DONE]\n\n") {
				t.Errorf("stream %d: %v, %.300s", i, err, text[max(0, len(text)-300):])
				return
			}
			mu.Lock()
			defer mu.Unlock()
			done++
		})
	}
	testmesh.Eventually(t, "the streams to flow", 20*time.Second, func() bool { return live(t, m) >= streams })
	for _, args := range [][]string{{"gateway"}, {"envoy", "--handover", "15s"}, {"gateway"}} {
		if err := restart(m, args...); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	if done > 0 {
		t.Errorf("%d streams ended before the restarts did: nothing was shown for them", done)
	}
	mu.Unlock()
	carriedBefore(t, m, streams)
	// A third Envoy would end the first one, with its streams.
	if err := restart(m, "envoy"); err == nil || !strings.Contains(err.Error(), "still carries answers") {
		t.Errorf("second restart of Envoy: %v, want it refused", err)
	}
	long.Wait()
	for _, r := range load.Stop() {
		if r.Err != nil {
			t.Errorf("request at %v: %v", r.Start.Format("05.000"), r.Err)
		}
	}
	for _, part := range []string{"gateway", "envoy"} {
		testmesh.Eventually(t, "the end of the old "+part, 40*time.Second, func() bool { return !testmesh.Alive(before[part]) })
	}
	// What took over is looked after like what came first.
	m.Signal(t, "envoy", syscall.SIGKILL)
	m.Signal(t, "gateway", syscall.SIGKILL)
	testmesh.Eventually(t, "service after a kill", 30*time.Second, func() bool { return serves(t, m) && viaRelay(t, m) })
}

// carriedBefore checks that the gateway which was replaced first still carries so many
// streams, that they are listed at the last one, and that one can be moved there.
func carriedBefore(t *testing.T, m *testmesh.Mesh, streams int) {
	t.Helper()
	var of []fleet.StreamView
	testmesh.Eventually(t, "the streams of two gateways before at the third", 5*time.Second, func() bool {
		list := streamList(m)
		by := map[string][]fleet.StreamView{}
		for _, s := range list.Streams {
			by[s.Gateway] = append(by[s.Gateway], s)
		}
		for _, name := range list.Gateways {
			if len(by[name]) > len(of) {
				of = by[name]
			}
		}
		return len(list.Gateways) == 3 && len(of) >= streams && of[0].Gateway != list.Gateways[0]
	})
	c := exec.Command(bin, "migrate", of[0].ID)
	c.Dir = m.Dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("migrate: %v, %s", err, out)
		return
	}
	testmesh.Eventually(t, "the move of a stream of the first gateway", 5*time.Second, func() bool {
		for _, s := range streamList(m).Streams {
			if s.ID == of[0].ID {
				return len(s.Moves) > 0
			}
		}
		return false
	})
}

// streamList is what `kvmesh streams` lists, empty where it fails.
func streamList(m *testmesh.Mesh) (l fleet.StreamList) {
	c := exec.Command(bin, "streams", "-o", "json")
	c.Dir = m.Dir
	out, err := c.Output()
	if err != nil || json.Unmarshal(out, &l) != nil {
		return fleet.StreamList{}
	}
	return l
}

// live is the number of streams that the gateway carries.
func live(t *testing.T, m *testmesh.Mesh) int {
	t.Helper()
	c := exec.Command(bin, "streams")
	c.Dir = m.Dir
	out, err := c.Output()
	if err != nil {
		return 0
	}
	return strings.Count(string(out), " stream ")
}
