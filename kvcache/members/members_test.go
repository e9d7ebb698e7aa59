package members_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/kvcache/members"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// ids are those of members, with a space between.
func ids(list []placement.Member) string {
	var all []string
	for _, m := range list {
		all = append(all, m.ID)
	}
	return strings.Join(all, " ")
}

// entries are those of ids with a number each.
func entries(seq uint64, names ...string) map[string]members.Entry {
	all := map[string]members.Entry{}
	for _, id := range names {
		all[id] = members.Entry{ID: id, Address: "10.0.0.1:1", Incarnation: 7, Seq: seq}
	}
	return all
}

// TestView: who is alive is a matter of numbers that change and of the reader's own clock.
func TestView(t *testing.T) {
	var v members.View
	now := time.Unix(1_000_000_000, 0) // whatever others think that it is
	both := map[string]bool{"a": true, "b": true}
	check := func(step string, got []placement.Member, want string) {
		t.Helper()
		if ids(got) != want {
			t.Errorf("%s: %q are alive, want %q", step, ids(got), want)
		}
	}
	check("at first", v.Take(now, entries(1, "a", "b"), both, true), "a b")
	now = now.Add(14 * time.Second)
	mixed := entries(2, "a")
	mixed["b"] = entries(1, "b")["b"]
	check("b is silent", v.Take(now, mixed, both, true), "a b")
	now = now.Add(time.Second)
	check("b is silent for 15 s", v.Take(now, mixed, both, true), "a")
	check("b restarts, and counts from 1", v.Take(now, entries(1, "a", "b"), both, true), "a b")
	now = now.Add(10 * time.Second)
	v.Away(now)
	now = now.Add(14 * time.Second)
	check("Redis was away, and is back with nothing", v.Take(now, nil, nil, false), "a b")
	check("it has this reader again", v.Take(now, entries(3, "a"), map[string]bool{"a": true}, true), "a b")
	check("and b", v.Take(now, entries(3, "a", "b"), both, true), "a b")
	now = now.Add(14 * time.Second)
	check("Redis has been there for long", v.Take(now, entries(4, "a", "b"), both, true), "a b")
	now = now.Add(time.Second)
	check("b has signed off", v.Take(now, entries(5, "a"), map[string]bool{"a": true}, true), "a")
}

func TestParse(t *testing.T) {
	good := members.Entry{ID: "a", Zone: "z", Address: "10.0.0.1:1", Room: 1, Busy: 0.5, Incarnation: 2, Seq: 3}
	raw, err := json.Marshal(good)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := members.Parse("a", raw); err != nil || got != good {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{
		"", "{}", `{"id":"b","address":"h:1"}`, `{"id":"a"}`, `{"id":"a","address":"h:1","busy":2}`, `{"id":"a","address":"h:1","room_bytes":-1}`,
		`{"id":"a","address":"h:1","zone":"` + strings.Repeat("z", 5000) + `"}`,
	} {
		if got, err := members.Parse("a", []byte(text)); err == nil {
			t.Errorf("%.80q was read as %+v", text, got)
		}
	}
}

// FuzzParse: whatever stands in Redis, what is read of it can be used.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"id":"a","zone":"z","address":"10.0.0.1:1","room_bytes":1,"busy":0.5,"incarnation":2,"seq":3}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		e, err := members.Parse("a", raw)
		if err != nil {
			return
		}
		m := placement.Member{ID: e.ID, Zone: e.Zone, Addr: e.Address, Room: e.Room, Busy: e.Busy}
		if err := m.Validate(); err != nil {
			t.Errorf("%q: %v", raw, err)
		}
	})
}

// node is a node that announces itself.
type node struct {
	testing.TB
	stop func()

	mu  sync.Mutex
	see string
}

func start(t testing.TB, url, id string, incarnation uint64) *node {
	t.Helper()
	client, err := redislink.Open(redislink.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &node{TB: t}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		members.Run(ctx, members.Config{
			Client: client, Incarnation: incarnation, Log: slog.New(slog.DiscardHandler),
			Self: func() placement.Member { return placement.Member{ID: id, Zone: "z", Addr: "10.0.0.1:1"} },
			Changed: func(list []placement.Member) {
				n.mu.Lock()
				defer n.mu.Unlock()
				n.see = ids(list)
			},
		})
	}()
	n.stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		client.Close()
	})
	t.Cleanup(n.stop)
	return n
}

// sees waits until a node sees others.
func (n *node) sees(what string, within time.Duration) {
	n.Helper()
	for end := time.Now().Add(within); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		n.mu.Lock()
		got := n.see
		n.mu.Unlock()
		if got == what {
			return
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Fatalf("it sees %q after %v, want %q", n.see, within, what)
}

// TestRedis: nodes find each other, one that ends is gone at once, Redis may begin anew, and
// a process that is not the node any more changes nothing.
func TestRedis(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	a, b := start(t, s.URL(), "a", 1), start(t, s.URL(), "b", 1)
	a.sees("a b", time.Minute)
	b.sees("a b", time.Minute)
	c := start(t, s.URL(), "c", 1)
	a.sees("a b c", time.Minute)
	c.stop()
	a.sees("a b", time.Minute)

	later := start(t, s.URL(), "b", 2)
	later.sees("a b", time.Minute)
	b.stop() // which removes nothing: b is another process now
	client, err := redislink.Open(redislink.Config{URL: s.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	raw, err := client.Get(t.Context(), members.Key("b")).Bytes()
	if err != nil {
		t.Fatal(err)
	}
	if e, err := members.Parse("b", raw); err != nil || e.Incarnation != 2 {
		t.Errorf("%+v, %v", e, err)
	}
	if err := client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ { // both write again, and nobody was taken for gone meanwhile
		got, err := client.SMembers(t.Context(), members.Active).Result()
		if err == nil && len(got) == 2 {
			break
		}
		if i > 3000 {
			t.Fatalf("after Redis began anew: %v, %v", got, err)
		}
		a.mu.Lock()
		if seen := strings.Fields(a.see); !slices.Contains(seen, "b") {
			t.Fatalf("it sees %q", a.see)
		}
		a.mu.Unlock()
		<-time.After(20 * time.Millisecond)
	}
}
