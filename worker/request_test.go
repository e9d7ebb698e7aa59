package worker_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// TestLateChoicesAreNotRefused: the later choices of a stream find a queue that others
// have filled, and are generated all the same.
func TestLateChoicesAreNotRefused(t *testing.T) {
	const n = 12
	r := start(t, sim.Config{MaxSeqs: 2, MaxQueue: 2, ITL: time.Millisecond}, worker.Config{})
	done := make(chan struct{})
	var crowd sync.WaitGroup
	defer crowd.Wait()
	defer close(done)
	first := r.post(t, textPath, fmt.Sprintf(`{"model":"sim","prompt":"x","max_tokens":20,"n":%d,"ignore_eos":true,"stream":true}`, n))
	for range 6 {
		crowd.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				resp, err := r.client.Post(r.base+textPath, "application/json", strings.NewReader(`{"model":"sim","prompt":"y","max_tokens":3,"ignore_eos":true}`))
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
			}
		})
	}
	s := readStream(first.Body)
	if !s.whole() {
		t.Fatalf("status %d, the stream ends with %s", first.StatusCode, s.events[len(s.events)-1])
	}
	for i, reason := range s.joined(t, n).Reasons {
		if reason != "length" {
			t.Errorf("choice %d ends with %q", i, reason)
		}
	}
}

// TestContinuationsAreRefusedBeforeTheHeader: one that finds the queue full gets a
// status, though a part of it could have been sent at once.
func TestContinuationsAreRefusedBeforeTheHeader(t *testing.T) {
	r := start(t, sim.Config{MaxSeqs: 1, MaxQueue: -1, ITL: time.Hour}, worker.Config{RelaySecret: secret})
	all := r.engine.Decode([]int32{97, 98, 99})
	resume := func(first, second string) *http.Response {
		return r.do(t, http.MethodPost, textPath, `{"model":"sim","prompt":"x","max_tokens":3,"n":2,"ignore_eos":true,"stream":true,"kvmesh":{"token_ids":true,"resume":{"stream":"s","attempt":2,"choices":[`+
			first+`,`+second+`]}}}`, names.Relay, secret)
	}
	over := fmt.Sprintf(`{"index":0,"token_ids":[97,98,99],"text_bytes":%d}`, len(all))
	ended := readStream(resume(over, strings.Replace(over, `"index":0`, `"index":1`, 1)).Body)
	if !ended.whole() {
		t.Errorf("with nothing left to generate: %q", ended.events)
	}
	owed := readStream(resume(over, `{"index":1,"token_ids":[97,98],"text_bytes":1}`).Body).joined(t, 2)
	if owed.Texts[0] != "" || !strings.HasPrefix(owed.Texts[1], "b") || len(owed.Texts[1]) < 2 {
		t.Errorf("went on with %q, want nothing and the b that is owed with a token more", owed.Texts)
	}
	busy := r.post(t, textPath, `{"model":"sim","prompt":"x","max_tokens":3,"stream":true,"sim":{"ttft_ms":0}}`)
	if busy.StatusCode != http.StatusOK {
		t.Fatalf("status %d", busy.StatusCode)
	}
	for what, second := range map[string]string{
		"a choice has ended":      `{"index":1,"token_ids":[97],"text_bytes":1}`,
		"text is owed":            `{"index":1,"token_ids":[97,98],"text_bytes":0}`,
		"a choice has not begun":  `{"index":1,"token_ids":[],"text_bytes":0}`,
		"nothing was taken of it": fmt.Sprintf(`{"index":1,"token_ids":[97],"text_bytes":%d}`, len(r.engine.Decode([]int32{97}))),
	} {
		if resp := resume(over, second); resp.StatusCode != http.StatusTooManyRequests {
			t.Errorf("%s: status %d, want 429: %v", what, resp.StatusCode, decode[any](t, resp, resp.StatusCode))
		}
	}
}

// TestRequest: places are taken once and given back as choices end.
func TestRequest(t *testing.T) {
	taken := 0
	take := func(n int) error { taken += n; return nil }
	give := func(n int) { taken -= n }
	r := worker.NewRequest(4, 2)
	leave := make([]func(), 3)
	for i := range leave {
		var err error
		if leave[i], err = r.Enter(take, give); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []int{2, 2, 1} {
		leave[i]()
		leave[i]() // once is enough
		if taken != want || r.Places() != want {
			t.Errorf("%d choices have left: %d places, held %d, want %d", i+1, taken, r.Places(), want)
		}
	}
	if r.End(); taken != 0 {
		t.Errorf("%d places after the end", taken)
	}
	full := errors.New("full")
	r = worker.NewRequest(2, 2)
	for range 2 {
		if _, err := r.Enter(func(int) error { taken++; return full }, give); !errors.Is(err, full) || taken != 1 {
			t.Errorf("refused with %v, asked %d times", err, taken)
		}
	}
	r.End()
	for _, first := range []bool{true, false} {
		r := worker.NewRequest(1, 1)
		var begun, refused bool
		if first {
			begun, refused = r.Begin(), r.Refuse()
		} else {
			refused, begun = r.Refuse(), r.Begin()
		}
		_, err := r.Enter(take, give)
		if begun != first || refused == first || r.Begun() != first || r.Refused() == first || (err == nil) != first {
			t.Errorf("begun %v, refused %v, then %v", begun, refused, err)
		}
	}
}
