//go:build unix

package kvnode

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// version is the fingerprint text and the weights of a version of a model.
func version(v string) (kvcache.Space, kvcache.Label) {
	return kvcache.NewSpace("m "+v, nil), kvcache.Label{Model: "m", Weights: "sha256:" + v, Text: "m " + v}
}

// putVersion puts one block of a version, as a worker does.
func putVersion(t *testing.T, c *Client, v string) *kvcache.Frame {
	t.Helper()
	space, label := version(v)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1, 2, 3}}, []kvcache.Part{{Size: 100_000}}, make([]byte, 100_000))
	if err == nil {
		err = c.Label(t.Context(), space.Fingerprint, label)
	}
	if err == nil {
		err = c.Put(t.Context(), f)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// finds says whether a look-up finds a block.
func finds(t *testing.T, c *Client, f *kvcache.Frame, resume bool) bool {
	t.Helper()
	m, err := c.Longest(t.Context(), kvcache.Query{Space: f.Space, IDs: f.IDs, Resume: resume})
	if err != nil {
		t.Fatal(err)
	}
	return len(m.Blocks) == 1
}

// TestEpochRefuses: from the moment on at which a worker with new weights is there, new
// streams find nothing of the old ones, in memory and on the disk. Those that go on do, and
// append; when they have ended the old version's room is given back in both.
func TestEpochRefuses(t *testing.T) {
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	registry := prometheus.NewRegistry()
	dir := nodeDir(t)
	n, err := startNodeOf(arena.Config{Dir: dir, Limit: 8 << 20, Lease: time.Millisecond, Linger: time.Millisecond, SweepEvery: time.Millisecond},
		ServerConfig{Epochs: openEpochs(t, EpochConfig{File: filepath.Join(t.TempDir(), "e"), Every: time.Millisecond, Registry: registry})}, stack.Tier{Name: "nvme", Store: disk})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.end)
	c := newClient(t, dir)
	old := putVersion(t, c, "1")
	spec := kvcache.TailSpec{Space: old.Space, Stream: "s", Attempt: 1, Parent: old.Key, First: 3}
	w, err := c.OpenTail(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	settle(n)
	if !finds(t, c, old, false) {
		t.Fatal("it is not found before")
	}
	newer := putVersion(t, c, "2")
	if finds(t, c, old, false) || !finds(t, c, old, true) || !finds(t, c, newer, false) {
		t.Error("the old version is found by new streams, or not by those that go on, or the new one is not")
	}
	if v := testutil.ToFloat64(n.server.epochs.metrics.refused); v == 0 {
		t.Error("nothing was counted as refused")
	}
	if err := w.Append(kvcache.Range{First: 3, IDs: []int32{4}, Data: []byte("kv")}); err != nil {
		t.Errorf("a stream of the old version goes on: %v", err)
	}
	for range 50 { // rounds of the background
		<-time.After(time.Millisecond)
	}
	if tails, err := c.ReadTail(t.Context(), old.Space, "s", 0); err != nil || len(tails) != 1 || !finds(t, c, old, true) || !has(t, c, old) {
		t.Errorf("%d tails of a stream that goes on: %v", len(tails), err)
	}
	if err := c.DropTail(t.Context(), old.Space, "s"); err != nil {
		t.Fatal(err)
	}
	var list []EpochState
	for len(list) == 0 || list[0].LeftVersions > 0 {
		<-time.After(time.Millisecond)
		if list, err = c.Epochs(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if list[0].Number != 2 || list[0].Weights != "sha256:2" || list[0].LeftBytes != 0 {
		t.Errorf("%+v", list)
	}
	for _, s := range []kvcache.Store{c, disk} {
		if _, err := s.Get(t.Context(), old.Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("it still takes room: %v", err)
		}
		l, err := s.Get(t.Context(), newer.Ref)
		if err != nil {
			t.Fatalf("the new version's block: %v", err)
		}
		l.Release()
	}
	if n, err := testutil.GatherAndCount(registry, "kvmesh_kv_epoch", "kvmesh_kv_epoch_left_bytes", "kvmesh_kv_epoch_left_versions", "kvmesh_kv_epoch_reclaimed_bytes_total"); err != nil || n != 4 {
		t.Errorf("%d metrics: %v", n, err)
	}
	if v := testutil.ToFloat64(n.server.epochs.metrics.bytes); v < 100_000 {
		t.Errorf("%v bytes reclaimed", v)
	}
}

// settle waits until everything is written to the far tiers.
func settle(n *node) {
	for n.below.Behind() > 0 {
		<-time.After(time.Millisecond)
	}
}

// openEpochs opens records.
func openEpochs(t *testing.T, cfg EpochConfig) *Epochs {
	t.Helper()
	e, err := OpenEpochs(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestEpochsKilled: a node that is killed right behind an answer knows the epoch when it is
// back, refuses, and goes on to give back room.
func TestEpochsKilled(t *testing.T) {
	dir := nodeDir(t)
	p := startProcess(t, dir, 8<<20)
	c := newClient(t, dir)
	names := [2]string{"1", "2"} // the old version and the new one
	for _, v := range names {
		putVersion(t, c, v)
	}
	for round := range 5 {
		if err := p.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = p.Wait()
		p = startProcess(t, dir, 8<<20)
		// What was given back meanwhile is computed again; so is what was there when it was put,
		// and then given back. After a put or a look-up it is spared.
		old, newer := putVersion(t, c, names[0]), putVersion(t, c, names[1])
		if !finds(t, c, old, true) {
			putVersion(t, c, names[0])
		}
		if finds(t, c, old, false) || !finds(t, c, old, true) || !finds(t, c, newer, false) {
			t.Fatalf("round %d: the old version is found by a new stream, or something is missing", round)
		}
		if _, err := c.SetEpoch(t.Context(), "m", "sha256:"+names[0]); err != nil {
			t.Fatal(err)
		}
		if !finds(t, c, old, false) || finds(t, c, newer, false) {
			t.Fatalf("round %d: after a rollback the version that has gone is found, or the other is not", round)
		}
		names[0], names[1] = names[1], names[0]
	}
	list, err := c.Epochs(t.Context())
	if err != nil || len(list) != 1 || list[0].Number != 7 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := c.SetEpoch(t.Context(), "m", "no kind"); err == nil || !strings.Contains(err.Error(), "KIND:HASH") {
		t.Errorf("weights that are none: %v", err)
	}
}

// TestEpochReturns: earlier weights take their place again when those of today have not been
// used for long, and not before.
func TestEpochReturns(t *testing.T) {
	e := openEpochs(t, EpochConfig{File: filepath.Join(t.TempDir(), "e"), Return: time.Minute})
	one, first := version("1")
	two, second := version("2")
	now := time.Now()
	announce := func(s kvcache.Space, l kvcache.Label) {
		t.Helper()
		if err := e.announce(s.Fingerprint, l, now); err != nil {
			t.Fatal(err)
		}
	}
	announce(one, first)
	announce(two, second)
	now = now.Add(time.Minute - 1)
	announce(one, first)
	if e.admits(kvcache.Query{Space: one}, now) || !e.admits(kvcache.Query{Space: two}, now) {
		t.Error("the old version is back already")
	}
	now = now.Add(time.Minute - 1) // since the last use
	announce(one, first)
	if e.admits(kvcache.Query{Space: one}, now) {
		t.Error("the old version is back, though the new one was used")
	}
	now = now.Add(1)
	announce(one, first)
	if !e.admits(kvcache.Query{Space: one}, now) || e.admits(kvcache.Query{Space: two}, now) {
		t.Error("the old version is not back")
	}
	if err := e.announce(one.Fingerprint, kvcache.Label{Model: "m"}, now); err != nil {
		t.Errorf("a label without weights: %v", err)
	}
	var none *Epochs
	if err := none.announce(one.Fingerprint, first, now); err != nil || !none.admits(kvcache.Query{Space: one}, now) {
		t.Error("a node without epochs refuses")
	}
}

// TestEpochsOnDisk: the memory of a host is lost, and the node's disk knows the epochs; also
// where a worker has come meanwhile. Files that cannot be read are begun anew.
func TestEpochsOnDisk(t *testing.T) {
	dir := t.TempDir()
	lost, kept := filepath.Join(dir, "memory"), filepath.Join(dir, "disk")
	one, first := version("1")
	two, second := version("2")
	now := time.Now()
	e := openEpochs(t, EpochConfig{File: lost, Copy: kept})
	for _, err := range []error{
		e.announce(one.Fingerprint, first, now), e.announce(two.Fingerprint, second, now), e.writeCopy(t.Context()),
		os.Remove(lost), os.WriteFile(kept+".new-1", []byte("half"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	again := openEpochs(t, EpochConfig{File: lost, Copy: kept})
	if d := cmp.Diff(e.state(), again.state()); d != "" {
		t.Error(d)
	}
	if again.admits(kvcache.Query{Space: one}, now) {
		t.Error("the old version is found after the loss of the memory")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new-*")); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
	for _, bad := range []string{"", "{", `{"version":9}`, `{"version":1,"epochs":[{"epoch":3}]}`} {
		if err := os.WriteFile(lost, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if e := openEpochs(t, EpochConfig{File: lost}); len(e.state()) != 0 {
			t.Errorf("%q: %+v", bad, e.state())
		}
	}
	if _, err := OpenEpochs(EpochConfig{}); err == nil {
		t.Error("epochs without a file")
	}
	full := openEpochs(t, EpochConfig{File: filepath.Join(dir, "no", "folder")})
	if err := full.announce(one.Fingerprint, first, now); err == nil {
		t.Error("what is not kept was acknowledged")
	}
}

// hung is a tier whose drops have no answer.
type hung struct{ *nvmetier.Store }

// Drop implements kvcache.Store.
func (h hung) Drop(ctx context.Context, _ kvcache.Fingerprint) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestCopyBesideHungTier: what is new is in the copy at once, also while a tier hangs that is
// to give back room.
func TestCopyBesideHungTier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, err := arena.Open(arena.Config{Dir: filepath.Join(t.TempDir(), "near"), Limit: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		defer near.Close()
		below, err := stack.New(stack.Config{Near: near, Far: []stack.Tier{{Name: "s3", Store: hung{}}}})
		if err != nil {
			t.Fatal(err)
		}
		defer below.Close()
		dir := t.TempDir()
		e := openEpochs(t, EpochConfig{File: filepath.Join(dir, "memory"), Copy: filepath.Join(dir, "disk")})
		go e.run(t.Context(), near, below)
		one, first := version("1")
		two, second := version("2")
		if err := errors.Join(e.announce(one.Fingerprint, first, time.Now()), e.announce(two.Fingerprint, second, time.Now())); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		begin := time.Now()
		below.Owe(stack.Owed{Tier: "s3", Fingerprint: two.Fingerprint})
		_, err = e.Set("other", first.Weights)
		if err := errors.Join(err, e.keepOwed(below)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if file, err := readEpochs(e.cfg.Copy); err != nil || len(file.Epochs) != 2 || len(file.Owed) != 1 || time.Since(begin) != 0 {
			t.Errorf("the copy has %+v, %v", file, err)
		}
		if n := e.state()[0].LeftVersions; n != 1 {
			t.Errorf("%d versions are left, want 1: the test proves nothing", n)
		}
	})
}

// FuzzEpochs: no file of epochs breaks a node, or refuses what it names as today's.
func FuzzEpochs(f *testing.F) {
	f.Add([]byte(`{"version":1,"epochs":[{"model":"m","epoch":2,"weights":"k:2","fingerprints":["` + strings.Repeat("ab", 32) + `"],"old":[{"fingerprint":"` + strings.Repeat("cd", 32) + `","weights":"k:1"}]}]}`))
	f.Add([]byte(`{"version":1,"names":[{"model":"m"},{"model":""}],"owed":[{"tier":"redis","fingerprint":"` + strings.Repeat("ab", 32) + `"},null]}`))
	f.Add([]byte(`{"version":1,"epochs":[null,{"weights":":"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := parseEpochs(text)
		e := openEpochs(t, EpochConfig{File: filepath.Join(t.TempDir(), "e")})
		e.take(file, err, true)
		for _, s := range e.state() {
			if _, err := e.Set(s.Model, s.Weights+"x"); err != nil && len(s.Weights) < 500 {
				t.Errorf("%q: %v", s.Model, err)
			}
		}
		_ = e.reclaimed(kvcache.Fingerprint{})
		if err := e.writeCopy(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
