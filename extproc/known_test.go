package extproc

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// TestKnown: what is known of a prompt decides who is first, what is not is learned of the one that
// was chosen, and a request that goes to nobody teaches nothing.
func TestKnown(t *testing.T) {
	set, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(policyYAML)})
	if err != nil {
		t.Fatal(err)
	}
	p, err := picker.New(picker.Config{Policy: set, Held: func(x picker.Prompt) map[string]int {
		return map[string]int{"b2": len(x.IDs)} // the one with more to do
	}})
	if err != nil {
		t.Fatal(err)
	}
	p.Update(fleet())
	var learned []picker.Decision
	s, err := New(Config{
		Policy: set, Picker: p, Held: semaphore.NewWeighted(int64(set.Mesh.HeldBodies)),
		Registerer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		Known: func(_ time.Time, req *openai.Request) (picker.Prompt, func(picker.Decision)) {
			if strings.Contains(string(req.Raw("prompt")), "known") {
				return picker.Prompt{IDs: make([]int32, 2000), Tokens: 2000}, nil
			}
			return picker.Prompt{}, func(d picker.Decision) { learned = append(learned, d) }
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	first := func(body string) string {
		t.Helper()
		set := setHeaders(generate(t, s, "/v1/completions", body).GetRequestBody().GetResponse().GetHeaderMutation())
		return strings.Split(set[names.Destination], ",")[0]
	}
	if got := first(`{"model":"chat","prompt":"known"}`); got != "10.0.0.2:80" || len(learned) != 0 {
		t.Errorf("what b2 holds goes to %s", got)
	}
	if got := first(`{"model":"chat","prompt":"new"}`); got != "10.0.0.1:80" || len(learned) != 1 || learned[0].Pool != "big" || learned[0].Model != "big-1" {
		t.Errorf("what nobody holds goes to %s, learned %+v", got, learned)
	}
	if n, tokens := testutil.ToFloat64(s.metrics.held), testutil.ToFloat64(s.metrics.heldTokens); n != 1 || tokens != 2000 {
		t.Errorf("%v requests with %v tokens are counted", n, tokens)
	}
}
