package worker_test

import (
	"context"
	"io"
	"iter"
	"net/http"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// recorder notes the priority of each generation.
type recorder struct {
	*sim.Engine
	seen chan int
}

// Generate implements worker.Engine.
func (e *recorder) Generate(ctx context.Context, ids []int32, p worker.Params) iter.Seq2[worker.Token, error] {
	e.seen <- p.Priority
	return e.Engine.Generate(ctx, ids, p)
}

// TestPriority: a priority is the relay's to give, in its header, or everybody's where
// they are trusted; vLLM's body field counts the other way round.
func TestPriority(t *testing.T) {
	begin := func(trust bool) (*running, chan int) {
		e := &recorder{newSim(t, sim.Config{}), make(chan int, 8)}
		r := &running{engine: e.Engine}
		r.run(t, worker.Config{Open: opener(e), RelaySecret: secret, TrustPriority: trust})
		<-r.Changed()
		return r, e.seen
	}
	strict, strictSeen := begin(false)
	open, openSeen := begin(true)
	relay := []string{names.Relay, secret}
	header := func(v string, more ...string) []string { return append([]string{names.Priority, v}, more...) }
	for name, c := range map[string]struct {
		field        string
		header       []string
		strict, open int
	}{
		"nothing said":          {},
		"relay's header":        {"", header("7", relay...), 7, 7},
		"may be shed":           {"", header("-2", relay...), -2, -2},
		"anybody's header":      {"", header("7"), 0, 7},
		"anybody's body":        {`,"priority":-3`, nil, 0, 3},
		"body through a relay":  {`,"priority":-3`, relay, 0, 3},
		"header before body":    {`,"priority":-3`, header("1", relay...), 1, 1},
		"no number in a header": {"", header("high", relay...), 0, 0},
		"null":                  {`,"priority":null`, nil, 0, 0},
	} {
		body := `{"model":"sim","prompt":"x","max_tokens":1,"n":2` + c.field + `}`
		for _, w := range []struct {
			r    *running
			seen chan int
			want int
		}{{strict, strictSeen, c.strict}, {open, openSeen, c.open}} {
			resp := w.r.do(t, http.MethodPost, textPath, body, c.header...)
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: status %d, %v", name, resp.StatusCode, err)
			}
			for range 2 {
				if got := <-w.seen; got != w.want {
					t.Errorf("%s: priority %d, want %d", name, got, w.want)
				}
			}
		}
	}
	// Who may say a priority is told of one that is none; from others it does not count.
	for value, want := range map[string]int{"high": http.StatusBadRequest, "7.5": http.StatusBadRequest, "4294967296": http.StatusBadRequest, "7": http.StatusOK} {
		for r, want := range map[*running]int{open: want, strict: http.StatusOK} {
			resp := r.do(t, http.MethodPost, textPath, `{"model":"sim","prompt":"x","max_tokens":1}`, header(value)...)
			if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != want || want == http.StatusBadRequest && !strings.Contains(string(body), names.Priority) {
				t.Errorf("priority %s of a client, trusted %v: status %d, %s", value, r == open, resp.StatusCode, body)
			}
		}
	}
	<-openSeen
	for range 4 {
		<-strictSeen
	}
	const bad = `{"model":"sim","prompt":"x","priority":"high"}`
	for _, r := range []*running{open, strict} { // also where nobody reads it
		if e := decode[apiError](t, r.post(t, textPath, bad), http.StatusBadRequest); e.param() != "priority" {
			t.Errorf("a word as priority: %+v", e)
		}
	}
}
