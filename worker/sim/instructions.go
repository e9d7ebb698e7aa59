package sim

import (
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Instructions are what a request may ask of the simulator, in its body field
// "sim", or the header x-kvmesh-sim where the worker allows it. Absent fields leave the engine's own setting. Token numbers count from 0
// in each choice. Unknown fields are refused.
type Instructions struct {
	TTFTms     *float64 `json:"ttft_ms"`      // time to the first token, in place of TTFT and PrefillPerToken
	ITLms      *float64 `json:"itl_ms"`       // time between two tokens
	StepMs     *float64 `json:"step_ms"`      // tokens come at multiples of this, all streams' together: an engine's that computes them in one batch
	Max        *int     `json:"max"`          // the answer ends by itself after so many tokens, 0 = never
	StallAt    *int     `json:"stall_at"`     // wait before this token
	StallMs    *float64 `json:"stall_ms"`     // for so long, absent = until the client leaves
	CutAt      *int     `json:"cut_at"`       // close the connection before this token
	CutInside  bool     `json:"cut_inside"`   // with half of its event sent
	ErrorAt    *int     `json:"error_at"`     // send an error event before this token
	TruncateAt *int     `json:"truncate_at"`  // end the response without a finish_reason before this token
	Malformed  *int     `json:"malformed_at"` // send an event that is no JSON before this token
	NoDone     bool     `json:"no_done"`      // end the stream without [DONE]
	WrongAt    *int     `json:"wrong_at"`     // say another token than the model's here, or at the next whole character
	CorruptKV  bool     `json:"corrupt_kv"`   // publish KV that is not that of the tokens
	Status     *int     `json:"status"`       // answer with this status, 400 to 599
	Attempt    *int     `json:"attempt"`      // all of this for that attempt of the relay only
}

// parseInstructions reads the raw body field; nil gives no instructions.
func parseInstructions(raw []byte) (Instructions, *openai.Error) {
	var in Instructions
	if len(raw) == 0 {
		return in, nil
	}
	if bad := openai.DecodeStrict(raw, "sim", &in); bad != nil {
		return in, bad
	}
	for _, n := range []*int{in.Max, in.StallAt, in.CutAt, in.ErrorAt, in.TruncateAt, in.Malformed, in.WrongAt} {
		if n != nil && *n < 0 {
			return in, openai.Invalid("sim", "Invalid 'sim': %d is negative.", *n)
		}
	}
	for _, ms := range []*float64{in.TTFTms, in.ITLms, in.StepMs, in.StallMs} {
		if ms != nil && (*ms < 0 || *ms > 1e9) {
			return in, openai.Invalid("sim", "Invalid 'sim': %g ms is outside 0 to 1e9.", *ms)
		}
	}
	if s := in.Status; s != nil && (*s < 400 || *s > 599) {
		return in, openai.Invalid("sim", "Invalid 'sim': status %d is outside 400 to 599.", *s)
	}
	return in, nil
}

// Fault implements worker.Faulter.
func (e *Engine) Fault(req *openai.Request, attempt int) (worker.Fault, error) {
	f := worker.NoFault()
	in, err := parseInstructions(req.Sim)
	if err != nil {
		return f, err
	}
	if in.Attempt != nil && *in.Attempt != attempt {
		req.Sim = nil
		return f, nil
	}
	for _, p := range []struct {
		from *int
		to   *int
	}{{in.CutAt, &f.CutAt}, {in.ErrorAt, &f.ErrorAt}, {in.TruncateAt, &f.Truncate}, {in.Malformed, &f.Malformed}, {in.Status, &f.Status}} {
		if p.from != nil {
			*p.to = *p.from
		}
	}
	f.CutInside, f.NoDone = in.CutInside, in.NoDone
	return f, nil
}

// settings is the body of the control endpoint. A number sets, null returns to
// the real value, absence leaves as it is.
type settings struct {
	Running json.RawMessage `json:"running,omitempty"`  // reported load
	Waiting json.RawMessage `json:"waiting,omitempty"`  // reported load
	KVUsage json.RawMessage `json:"kv_usage,omitempty"` // reported load, 0..1
	TTFTms  json.RawMessage `json:"ttft_ms,omitempty"`  // speed of requests that start from now on
	ITLms   json.RawMessage `json:"itl_ms,omitempty"`   // likewise
}

// Handler implements worker.Controller: POST changes the settings (see the fields
// of its JSON body: running, waiting, kv_usage, ttft_ms, itl_ms; null clears one),
// GET and POST answer the load as it is reported now.
func (e *Engine) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet, http.MethodHead:
		case http.MethodPost:
			if bad := e.change(http.MaxBytesReader(w, r.Body, 1<<16)); bad != nil {
				bad.Write(w)
				return
			}
		default:
			w.Header().Set("Allow", "GET, HEAD, POST")
			openai.MethodNotAllowed(r.Method, r.URL.Path, "POST").Write(w)
			return
		}
		l := e.Load()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{ // the client may be gone
			"running": l.Running, "waiting": l.Waiting, "max_running": l.MaxRunning, "kv_usage": l.KVUsage,
		})
	})
}

// change applies the body of a POST, all of it or, when a part is wrong, nothing.
func (e *Engine) change(body io.Reader) *openai.Error {
	raw, err := io.ReadAll(body)
	if err != nil {
		return openai.Errorf(http.StatusBadRequest, "The settings could not be read to their end, or are larger than 64 KiB.")
	}
	var s settings
	if bad := openai.DecodeStrict(raw, "", &s); bad != nil {
		return bad
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	next := e.over
	for _, f := range []struct {
		raw  json.RawMessage
		to   **float64
		name string
	}{
		{s.Running, &next.running, "running"},
		{s.Waiting, &next.waiting, "waiting"},
		{s.KVUsage, &next.kvUsage, "kv_usage"},
		{s.TTFTms, &next.ttftMs, "ttft_ms"},
		{s.ITLms, &next.itlMs, "itl_ms"},
	} {
		if f.raw == nil {
			continue
		}
		*f.to = nil
		if err := json.Unmarshal(f.raw, f.to); err != nil || (*f.to != nil && (**f.to < 0 || **f.to > 1e9)) {
			return openai.Invalid(f.name, "Invalid value for '%s': expected a number from 0 to 1e9, or null.", f.name)
		}
	}
	e.over = next
	return nil
}

// overrides are the settings that were changed at run time, nil = not changed.
type overrides struct {
	running, waiting, kvUsage *float64
	ttftMs, itlMs             *float64
}

// duration reads a number of milliseconds, def when there is none.
func duration(ms *float64, def time.Duration) time.Duration {
	if ms == nil {
		return def
	}
	return time.Duration(*ms * float64(time.Millisecond))
}
