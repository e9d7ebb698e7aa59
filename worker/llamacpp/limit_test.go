package llamacpp

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// TestMostSequences: the largest number of sequences that is allowed starts an engine,
// says what it makes of it, and serves as many requests at once.
func TestMostSequences(t *testing.T) {
	for asked, running := range map[int]int{256: 255, 255: 255} {
		var log bytes.Buffer
		cfg := tinyConfig(t)
		cfg.MaxSeqs, cfg.MaxQueue, cfg.ContextLen, cfg.Cells, cfg.BatchTokens = asked, -1, 32, 8192, 512
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		e := openReal(t, cfg)
		if got := e.Load().MaxRunning; got != running {
			t.Errorf("%d asked for: %d run, want %d", asked, got, running)
		}
		if said := strings.Contains(log.String(), "asked=256"); said != (asked == 256) {
			t.Errorf("%d asked for, and the log says so: %v", asked, said)
		}
		ids := tokenize(t, e, "a")
		var all sync.WaitGroup
		for range asked {
			all.Go(func() {
				if n, err := drain(t.Context(), e, ids, worker.Params{MaxTokens: 2, TopP: 1, TopLogprobs: -1, IgnoreEOS: true}); err != nil || n != 2 {
					t.Errorf("%d tokens, %v", n, err)
				}
			})
		}
		all.Wait()
	}
}
