package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
)

// script is a control plane that sends what a test wrote, per connection.
type script struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	t     *testing.T
	steps []func(first *discoveryv3.DeltaDiscoveryRequest, s stream) error

	mu   sync.Mutex
	next int
}

type stream = discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer

// DeltaAggregatedResources plays the next step; after the last it hangs.
func (s *script) DeltaAggregatedResources(st stream) error {
	first, err := st.Recv()
	if err != nil {
		return err
	}
	s.mu.Lock()
	i := s.next
	s.next++
	s.mu.Unlock()
	if i >= len(s.steps) {
		<-st.Context().Done()
		return st.Context().Err()
	}
	return s.steps[i](first, st)
}

// watch runs a Watch against the script until until seconds of fake time are
// over, and returns what it was told.
func (s *script) watch(d time.Duration) (told []string) {
	ln := bufconn.Listen(1 << 16)
	g := grpc.NewServer()
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.Serve(ln) // ends with Stop
	}()
	ctx, cancel := context.WithTimeout(s.t.Context(), d)
	defer cancel()
	err := fleet.Watch(ctx, fleet.WatchConfig{
		Target: "passthrough:///control-plane", Node: "gateway-7",
		Dial: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) })},
	}, func(list []*fleetpb.Worker) {
		var words []string
		for _, w := range list {
			words = append(words, fmt.Sprintf("%s=%d", w.GetId(), w.GetWeight()))
		}
		told = append(told, strings.Join(words, " "))
	})
	if err != context.DeadlineExceeded {
		s.t.Errorf("Watch: %v", err)
	}
	g.Stop()
	<-done
	return told
}

// update makes a response of workers written as "id=weight" or "-id".
func update(t *testing.T, nonce string, words ...string) *discoveryv3.DeltaDiscoveryResponse {
	t.Helper()
	m := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: fleet.TypeURL, Nonce: nonce}
	for _, word := range words {
		if id, ok := strings.CutPrefix(word, "-"); ok {
			m.RemovedResources = append(m.RemovedResources, id)
			continue
		}
		var w fleetpb.Worker
		id, weight, _ := strings.Cut(word, "=")
		w.Id = id
		if _, err := fmt.Sscan(weight, &w.Weight); err != nil {
			t.Error(err)
		}
		packed, err := anypb.New(&w)
		if err != nil {
			t.Error(err)
		}
		m.Resources = append(m.Resources, &discoveryv3.Resource{Name: id, Version: "v" + weight, Resource: packed})
	}
	return m
}

// send sends a response and returns the client's answer to it.
func send(s stream, m *discoveryv3.DeltaDiscoveryResponse) (*discoveryv3.DeltaDiscoveryRequest, error) {
	if err := s.Send(m); err != nil {
		return nil, err
	}
	return s.Recv()
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var resumed map[string]string
		s := &script{t: t}
		s.steps = []func(*discoveryv3.DeltaDiscoveryRequest, stream) error{
			func(first *discoveryv3.DeltaDiscoveryRequest, st stream) error {
				if first.GetNode().GetId() != "gateway-7" || first.GetTypeUrl() != fleet.TypeURL || len(first.GetInitialResourceVersions()) != 0 {
					t.Errorf("first request %v", first)
				}
				for i, words := range [][]string{{"b=1", "a=1"}, {"a=2"}, {"a=2"}, {"c=3", "-b"}} {
					nonce := fmt.Sprint(i)
					ack, err := send(st, update(t, nonce, words...))
					if err != nil {
						return err
					}
					if ack.GetResponseNonce() != nonce || ack.GetErrorDetail() != nil {
						t.Errorf("answer to %v: %v", words, ack)
					}
				}
				return fmt.Errorf("crash")
			},
			// The next control plane finds out what the gateway has, and sends the rest.
			func(first *discoveryv3.DeltaDiscoveryRequest, st stream) error {
				resumed = first.GetInitialResourceVersions()
				_, err := send(st, update(t, "n", "c=4"))
				return err
			},
		}
		told := s.watch(time.Minute)
		want := []string{"a=1 b=1", "a=2 b=1", "a=2 c=3", "a=2 c=4"}
		if fmt.Sprint(told) != fmt.Sprint(want) {
			t.Errorf("told %q, want %q", told, want)
		}
		if fmt.Sprint(resumed) != fmt.Sprint(map[string]string{"a": "v2", "c": "v3"}) {
			t.Errorf("came back with versions %v", resumed)
		}
	})
}

// What cannot be read is refused as a whole and changes nothing.
func TestWatchRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{t: t}
		s.steps = []func(*discoveryv3.DeltaDiscoveryRequest, stream) error{
			func(_ *discoveryv3.DeltaDiscoveryRequest, st stream) error {
				if _, err := send(st, update(t, "1", "a=1")); err != nil {
					return err
				}
				bad := update(t, "2", "a=2", "b=2")
				bad.Resources[1].Resource = &anypb.Any{TypeUrl: fleet.TypeURL, Value: []byte{0xff}}
				if nack, err := send(st, bad); err != nil || nack.GetErrorDetail() == nil || nack.GetResponseNonce() != "2" {
					t.Errorf("answer to nonsense: %v, %v", nack, err)
				}
				other := update(t, "3", "a=3")
				other.TypeUrl = "another"
				if nack, err := send(st, other); err != nil || nack.GetErrorDetail() == nil {
					t.Errorf("answer to another type: %v, %v", nack, err)
				}
				_, err := send(st, update(t, "4", "a=4"))
				return err
			},
		}
		if told := s.watch(time.Minute); fmt.Sprint(told) != "[a=1 a=4]" {
			t.Errorf("told %q", told)
		}
	})
}

// An empty fleet is news once.
func TestWatchEmptyFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		empty := func(_ *discoveryv3.DeltaDiscoveryRequest, st stream) error {
			_, err := send(st, update(t, "1"))
			return err
		}
		s := &script{t: t, steps: []func(*discoveryv3.DeltaDiscoveryRequest, stream) error{empty, empty}}
		if told := s.watch(time.Minute); len(told) != 1 || told[0] != "" {
			t.Errorf("told %q, want one empty list", told)
		}
	})
}

func TestWatchTarget(t *testing.T) {
	if err := fleet.Watch(t.Context(), fleet.WatchConfig{Target: "\x00://"}, nil); err == nil {
		t.Error("a target that is none was taken")
	}
}

// A control plane that is still starting is no news; one that never comes is, once.
func TestWatchIsPatient(t *testing.T) {
	for _, tt := range []struct {
		wait time.Duration
		told int
	}{{4 * time.Second, 0}, {time.Minute, 1}} {
		synctest.Test(t, func(t *testing.T) {
			var log strings.Builder
			ctx, cancel := context.WithTimeout(t.Context(), tt.wait)
			defer cancel()
			_ = fleet.Watch(ctx, fleet.WatchConfig{ // it ends with ctx
				Target: "passthrough:///nobody", Log: slog.New(slog.NewTextHandler(&log, nil)),
				Dial: []grpc.DialOption{grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errors.New("refused") })},
			}, nil)
			if got := strings.Count(log.String(), "fleet watch lost"); got != tt.told {
				t.Errorf("after %v: told %d times, want %d\n%s", tt.wait, got, tt.told, log.String())
			}
		})
	}
}
