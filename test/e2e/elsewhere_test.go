package e2e

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// sharing is the part of a policy by which gateways share their streams. Its wait is long:
// a busy machine is no slow store.
func sharing(s *redistest.Server) string {
	return fmt.Sprintf("---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec:\n  registry: {redis: %q}\n  shareStreams: true\n  shareWait: 5s\n", s.URL())
}

// replicas starts two gateways, each with an Envoy and a control plane of its own, that
// have the workers of the first and a Redis in common.
func replicas(t *testing.T) (a, b *testmesh.Mesh, s *redistest.Server) {
	t.Helper()
	s = redistest.Start(t)
	t.Setenv("KVMESH_RELAY_SECRET", rand.Text())
	t.Setenv("REDIS_URL", s.URL()) // workers register there, too
	a = testmesh.StartPolicy(t, bin, quick+sharing(s))
	b = testmesh.StartPolicy(t, bin, strings.Replace(quick, "  local: [{id: worker-1}, {id: worker-2}, {id: worker-3}]\n", "", 1)+sharing(s))
	testmesh.Eventually(t, "the other gateway serves from the same workers", 20*time.Second, func() bool {
		n := 0
		for _, w := range b.Workers(t) {
			if w.Status == "HEALTHY" {
				n++
			}
		}
		return n == 3 && viaRelay(t, b)
	})
	return a, b, s
}

// Clients lose their gateway, or only the connection to it, and have the rest of their
// answers from another one, as if nothing had been.
func TestClientsComeBackElsewhere(t *testing.T) {
	a, b, s := replicas(t)
	taken := func(m *testmesh.Mesh) float64 {
		return relayMetric(t, m, `kvmesh_relay_passed_total{by="store",to="here"`)
	}
	t.Run("connection closed", func(t *testing.T) {
		closedConnections(t, a, b, 80, func() { secret(t, s) })
		if n := taken(b); n != 24 {
			t.Errorf("%v streams changed their gateway", n)
		}
	})
	t.Run("not theirs", func(t *testing.T) { notTheirs(t, a, b) })
	t.Run("taken over", func(t *testing.T) { takenElsewhere(t, a, b) })
	t.Run("store killed and back", func(t *testing.T) {
		before := taken(b)
		closedStore(t, a, b, s)
		if n := taken(b) - before; n != 8 {
			t.Errorf("%v streams changed their gateway", n)
		}
	})
	t.Run("gateway killed", func(t *testing.T) {
		before := taken(b)
		killedGateway(t, a, b)
		if n := taken(b) - before; n != 12 {
			t.Errorf("%v streams changed their gateway", n)
		}
	})
}

// secret checks that the store knows neither prompts nor answers, keys or stream ids, and
// keeps nothing for ever.
func secret(t *testing.T, s *redistest.Server) {
	t.Helper()
	keys, err := s.Client.Keys(t.Context(), "llm:stream:*").Result()
	if err != nil || len(keys) < 24 {
		t.Fatalf("streams in the store: %v, %v", keys, err)
	}
	for _, key := range keys {
		all, err := s.Client.HGetAll(t.Context(), key).Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{"client", "some-key", "sim-1", "data:", "id:"} {
			if strings.Contains(fmt.Sprint(all), word) {
				t.Errorf("the store holds %q in clear", word)
			}
		}
		if ttl := s.Client.TTL(t.Context(), key).Val(); ttl <= 0 || ttl > 2*time.Minute {
			t.Errorf("%s expires in %v", key, ttl)
		}
	}
}

// takenElsewhere comes back to one gateway while the connection to the other one, as it
// seems, is still there. That one ends with an error, and with nothing else than the other
// gets.
func takenElsewhere(t *testing.T, a, b *testmesh.Mesh) {
	want, err := streamed(t.Context(), a, ask{path: "/completions", body: resumable(1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	old, fresh := newHeard(), newHeard()
	var back sync.WaitGroup
	err = old.hear(http.DefaultClient, resuming(t.Context(), a, http.MethodPost, resumable(1), ""), func(h *heard) {
		if h.events == 20 {
			first := old.ids[0]
			back.Go(func() {
				if err := fresh.hear(http.DefaultClient, resuming(t.Context(), b, http.MethodGet, "", first), nil); err != nil {
					t.Error(err)
				}
			})
		}
	})
	back.Wait()
	if err != nil || !strings.Contains(old.failure, "stream_taken_over") || old.done {
		t.Errorf("the first connection: %v, %q", err, old.failure)
	}
	if !strings.HasPrefix(want.text[0], old.text[0]) {
		t.Errorf("the first connection had\n%s\nof\n%s", old.text[0], want.text[0])
	}
	n, err := strconv.Atoi(fresh.ids[0][strings.LastIndexByte(fresh.ids[0], ':')+1:])
	if err != nil || n != 2 || !fresh.done || !strings.HasSuffix(want.text[0], fresh.text[0]) || len(fresh.ids) != len(want.ids)-1 {
		t.Errorf("the second one begins with %s, has %d events of %d, ends %v:\n%s\nwant\n%s", fresh.ids[0], len(fresh.ids), len(want.ids), fresh.done, fresh.text[0], want.text[0])
	}
}

// killedGateway kills the gateway of a in the middle of answers: each client sees an
// error, comes back to b or, once it is there again, to a, and has its answer.
func killedGateway(t *testing.T, a, b *testmesh.Mesh) {
	const clients = 24
	want, got := make([]*heard, clients), make([]*heard, clients)
	each(clients, func(i int) {
		var err error
		if want[i], err = streamed(t.Context(), a, ask{path: "/completions", body: resumable(i)}, nil); err != nil || !want[i].done {
			t.Errorf("undisturbed answer %d: %v", i, err)
		}
	})
	var flowing, over sync.WaitGroup
	flowing.Add(clients)
	for i := range clients {
		over.Go(func() {
			got[i] = newHeard()
			err := got[i].hear(http.DefaultClient, resuming(t.Context(), a, http.MethodPost, resumable(i), ""), func(h *heard) {
				if h.events == 5 {
					flowing.Done()
				}
			})
			if err == nil || got[i].done || got[i].failure != "" || len(got[i].finish) > 0 {
				t.Errorf("client %d after %d events: %v, done %v, finish %v, %s", i, got[i].events, err, got[i].done, got[i].finish, got[i].failure)
			}
		})
	}
	flowing.Wait()
	a.Signal(t, "gateway", syscall.SIGKILL)
	over.Wait()
	if t.Failed() {
		return
	}
	back := func(i int, m *testmesh.Mesh) {
		if err := got[i].hear(http.DefaultClient, comingBack(t, i, m, got[i]), nil); err != nil {
			t.Errorf("client %d comes back: %v", i, err)
		} else if diff := got[i].same(want[i]); diff != "" {
			t.Errorf("client %d: %s", i, diff)
		}
	}
	each(clients/2, func(i int) { back(i, b) })
	testmesh.Eventually(t, "the gateway is back", 20*time.Second, func() bool { return viaRelay(t, a) })
	each(clients/2, func(i int) { back(clients/2+i, a) })
	if n := relayMetric(t, a, `kvmesh_relay_passed_total{by="store",to="here"`); n != clients/2 {
		t.Errorf("the new gateway took over %v streams", n)
	}
}

// closedStore kills the store and starts it again, empty, in the middle of answers: they
// go on, and can be taken over afterwards.
func closedStore(t *testing.T, a, b *testmesh.Mesh, s *redistest.Server) {
	const clients = 8
	body := func(i int) string { return answering(i, 200) }
	want, got := make([]*heard, clients), make([]*heard, clients)
	each(clients, func(i int) {
		var err error
		if want[i], err = streamed(t.Context(), a, ask{path: "/completions", body: body(i)}, nil); err != nil || !want[i].done {
			t.Errorf("undisturbed answer %d: %v", i, err)
		}
	})
	var flowing, on, over sync.WaitGroup
	flowing.Add(clients)
	on.Add(clients)
	again := make(chan struct{})
	for i := range clients {
		over.Go(func() {
			got[i] = newHeard()
			from := 0
			ctx, cancel := context.WithCancelCause(t.Context())
			err := got[i].hear(&http.Client{Transport: &http.Transport{}}, resuming(ctx, a, http.MethodPost, body(i), ""), func(h *heard) {
				select {
				case <-again:
					if from == 0 {
						from = h.events
						on.Done()
					} else if h.events == from+60 {
						cancel(errLeft)
					}
				default:
					if h.events == 5 {
						flowing.Done()
					}
				}
			})
			if err == nil {
				t.Errorf("client %d did not leave after %d events", i, got[i].events)
			}
		})
	}
	flowing.Wait()
	s.Kill()
	testmesh.Eventually(t, "the gateway goes on without", 20*time.Second, func() bool {
		return relayMetric(t, a, `kvmesh_relay_share_trouble_total{what="down"`) > 0
	})
	s.Start()
	close(again)
	on.Wait()
	over.Wait()
	each(clients, func(i int) {
		if err := got[i].hear(http.DefaultClient, comingBack(t, i, b, got[i]), nil); err != nil {
			t.Errorf("client %d comes back: %v", i, err)
		} else if diff := got[i].same(want[i]); diff != "" {
			t.Errorf("client %d: %s", i, diff)
		}
	})
}
