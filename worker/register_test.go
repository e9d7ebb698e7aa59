package worker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// answers is an HTTP transport that records requests and answers from a func.
type answers struct {
	begin time.Time
	seen  []string // method, path and time since the begin
	reply func() (status int, body string, err error)
}

func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	a.seen = append(a.seen, r.Method+" "+r.URL.RequestURI()+" "+time.Since(a.begin).String())
	status, body, err := a.reply()
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

// runRegistrar runs a registrar for a time within a bubble and signs off.
func runRegistrar(a *answers, log *slog.Logger, changed <-chan struct{}, d time.Duration) {
	a.begin = time.Now()
	r := &registrar{
		url: "http://cp/", client: &http.Client{Transport: a}, log: log, changed: changed, ended: make(chan struct{}),
		current: func() fleet.Registration { return fleet.Registration{ID: "a b", Incarnation: 7} },
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	go r.run(ctx)
	r.signOff()
}

func TestRegistrarRenewsAndSignsOff(t *testing.T) {
	for name, c := range map[string]struct {
		lease string
		want  []string
	}{
		"no lease":    {``, []string{"0s", "5s", "10s"}},
		"long lease":  {`{"ttl_seconds":600}`, []string{"0s", "5s", "10s"}},
		"short lease": {`{"ttl_seconds":12}`, []string{"0s", "4s", "8s"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := &answers{reply: func() (int, string, error) { return 200, c.lease, nil }}
			runRegistrar(a, slog.New(slog.DiscardHandler), nil, 11*time.Second)
			want := []string{"DELETE /v1/workers/a%20b?incarnation=7 11s"}
			for i, at := range c.want {
				want = append(want[:i:i], "PUT /v1/workers/a%20b "+at, want[i])
			}
			if diff := cmp.Diff(want, a.seen); diff != "" {
				t.Errorf("%s: %s", name, diff)
			}
		})
	}
}

func TestRegistrarRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		var log strings.Builder
		a := &answers{reply: func() (int, string, error) {
			switch tries++; {
			case tries == 1:
				return 200, `{"ttl_seconds":1.5}`, nil
			case tries <= 4:
				return 0, "", errors.New("no route")
			case tries <= 7:
				return 500, "starting", nil
			}
			return 200, "", nil
		}}
		runRegistrar(a, slog.New(slog.NewTextHandler(&log, nil)), nil, 5*time.Second)
		var got []string
		for _, s := range a.seen {
			got = append(got, strings.TrimPrefix(s, "PUT /v1/workers/a%20b "))
		}
		want := []string{"0s", "500ms", "600ms", "800ms", "1.2s", "2s", "3s", "4s", "DELETE /v1/workers/a%20b?incarnation=7 5s"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if n := strings.Count(log.String(), "level=WARN"); n != 2 {
			t.Errorf("%d warnings for two kinds of failure:\n%s", n, log.String())
		}
		if !strings.Contains(log.String(), "registered again") {
			t.Error("nothing tells that the registration works again")
		}
	})
}

// Started together, the worker may be there first: only what lasts is worth a
// warning, and what the control plane itself says always is.
func TestRegistrarIsPatient(t *testing.T) {
	for name, tt := range map[string]struct {
		wait  time.Duration
		reply func() (int, string, error)
		warns int
	}{
		"not up yet": {4 * time.Second, func() (int, string, error) { return 0, "", errors.New("refused") }, 0},
		"never up":   {time.Minute, func() (int, string, error) { return 0, "", errors.New("refused") }, 1},
		"refuses":    {time.Second, func() (int, string, error) { return 400, "no such pool", nil }, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log strings.Builder
			runRegistrar(&answers{reply: tt.reply}, slog.New(slog.NewTextHandler(&log, nil)), nil, tt.wait)
			if n := strings.Count(log.String(), "level=WARN"); n != tt.warns {
				t.Errorf("%s: %d warnings, want %d:\n%s", name, n, tt.warns, log.String())
			}
		})
	}
}

func TestRegistrarTellsChangesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		changed := make(chan struct{}, 1)
		a := &answers{reply: func() (int, string, error) { return 200, "", nil }}
		go func() {
			time.Sleep(2 * time.Second)
			changed <- struct{}{}
		}()
		runRegistrar(a, slog.New(slog.DiscardHandler), changed, 8*time.Second)
		want := []string{
			"PUT /v1/workers/a%20b 0s", "PUT /v1/workers/a%20b 2s", "PUT /v1/workers/a%20b 7s",
			"DELETE /v1/workers/a%20b?incarnation=7 8s",
		}
		if diff := cmp.Diff(want, a.seen); diff != "" {
			t.Error(diff)
		}
	})
}

// A control plane that hangs holds up the end for a second at most.
func TestSignOffIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &registrar{
			url: "http://cp", log: slog.New(slog.DiscardHandler), ended: make(chan struct{}),
			client: &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			})},
			current: func() fleet.Registration { return fleet.Registration{ID: "a"} },
		}
		close(r.ended)
		begin := time.Now()
		r.signOff()
		if d := time.Since(begin); d != time.Second {
			t.Errorf("signing off took %v", d)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
