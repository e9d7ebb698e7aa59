package relay

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
)

// A job is listed from its start to its end, with what its goroutine told last.
func TestStreams(t *testing.T) {
	r := &Relay{}
	now := time.Now()
	mk := func(id string, age time.Duration) *job {
		j := &job{r: r, in: &http.Request{Header: http.Header{}}, start: now.Add(-age), named: "m", led: ledger{stream: id}, stream: true}
		j.in.Header.Set(names.Stream, id)
		r.live.add(j)
		return j
	}
	young, old := mk("young", time.Second), mk("old", 3*time.Second)
	w := "worker-1"
	old.state.worker.Store(&w)
	old.state.attempt.Store(2)
	old.state.events.Add(7)

	rec := httptest.NewRecorder()
	r.StreamsHandler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v1/streams", nil))
	var got fleet.StreamList
	if err := json.Unmarshal(rec.Body.Bytes(), &got); err != nil || len(got.Streams) != 2 {
		t.Fatalf("streams = %s, %v", rec.Body, err)
	}
	v := got.Streams[0]
	if v.ID != "old" || v.Worker != w || v.Attempt != 2 || v.Events != 7 || v.Seconds < 3 || !v.Stream {
		t.Errorf("oldest stream = %+v", v)
	}
	r.live.remove(old)
	r.live.remove(young)
	if left := r.Streams(now); len(left) != 0 {
		t.Errorf("ended streams are listed: %+v", left)
	}
}
