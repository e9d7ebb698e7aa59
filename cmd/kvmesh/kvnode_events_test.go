package main

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvevents"
)

// TestNodeEvents: who follows a node knows what its memory holds, what was there before the
// node began to tell, too.
func TestNodeEvents(t *testing.T) {
	dir := t.TempDir()
	store, err := arena.Open(arena.Config{Dir: dir + "/kv", Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	space := kvcache.NewSpace("m", nil)
	ids := []int32{11, 12, 13, 14}
	first, second := space.Child(space.Root, ids[:2]), space.Child(space.Child(space.Root, ids[:2]).Key, ids[2:])
	put := func(ref kvcache.Ref, at int, ids []int32) {
		t.Helper()
		b := make([]byte, kvcache.HeaderLen(len(ids), 1)+100)
		f, err := kvcache.Seal(b, kvcache.Meta{Space: space, Parent: ref.Parent, First: at, IDs: ids}, []kvcache.Part{{Size: 100}})
		if err == nil {
			err = store.Put(t.Context(), f)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put(first, 0, ids[:2])
	ctx, cancel := context.WithCancel(t.Context())
	group, ctx := errgroup.WithContext(ctx)
	registry := prometheus.NewPedanticRegistry()
	o := eventOptions{listen: "ipc://" + dir + "/e", replay: "ipc://" + dir + "/r", tokenIDs: true}
	if err := o.serve(ctx, &env{log: slog.New(slog.NewTextHandler(io.Discard, nil))}, store, registry, group); err != nil {
		t.Fatal(err)
	}
	if n, err := testutil.GatherAndCount(registry, "kvmesh_kv_events_subscribers", "kvmesh_kv_events_lost_total"); err != nil || n != 2 {
		t.Errorf("%d metrics, %v", n, err)
	}
	index := kvevents.NewIndex(0)
	sub, err := kvevents.NewSubscriber(kvevents.SubscriberConfig{
		Address: o.listen, Replay: o.replay, OnBatch: func(b kvevents.Batch) { index.Apply("n", b) }, OnReset: func() { index.Forget("n") },
	})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() { sub.Run(ctx) })
	held := func(want int) {
		t.Helper()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(time.Minute); index.Held(kvevents.Prompt{IDs: ids})["n"] != want; <-tick.C {
			if time.Now().After(end) {
				t.Fatalf("%v tokens are held, want %d", index.Held(kvevents.Prompt{IDs: ids}), want)
			}
		}
	}
	held(2)
	put(second, 2, ids[2:])
	held(4)
	if _, err := store.Remove(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	held(0)
	cancel()
	done.Wait()
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// TestEventOptions: nobody but this host is told, and nothing without being asked.
func TestEventOptions(t *testing.T) {
	for _, o := range []eventOptions{
		{listen: "tcp://0.0.0.0:0"},
		{listen: "tcp://*:5557"},
		{listen: "127.0.0.1:0"},
		{tokenIDs: true},
		{replay: "tcp://127.0.0.1:0"},
		{listen: "tcp://127.0.0.1:0", replay: "tcp://192.0.2.1:0"},
	} {
		if err := o.serve(t.Context(), &env{log: slog.New(slog.DiscardHandler)}, nil, nil, nil); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	for _, address := range []string{"tcp://127.0.0.1:0", "tcp://[::1]:0"} {
		if l, err := listenEvents(t.Context(), "--events", address); err == nil {
			l.Close()
		} else if !slices.Contains([]string{"tcp://[::1]:0"}, address) { // where there is no IPv6
			t.Errorf("%s: %v", address, err)
		}
	}
}
