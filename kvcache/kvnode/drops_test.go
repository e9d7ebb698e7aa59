//go:build unix

package kvnode

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// undropped is a tier that cannot drop while it is away.
type undropped struct {
	*nvmetier.Store
	away *atomic.Bool
}

// Drop implements kvcache.Store.
func (u undropped) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	if u.away.Load() {
		return errors.New("the server is away")
	}
	return u.Store.Drop(ctx, f)
}

// dropRig is a node of which the memory or the process can go.
type dropRig struct {
	t          *testing.T
	disk       undropped
	file, copy string
	dir        string
	n          *node
}

// start starts the node, again.
func (r *dropRig) start() *Client {
	r.t.Helper()
	var err error
	r.n, err = startNodeOf(arena.Config{Dir: r.dir, Limit: 8 << 20},
		ServerConfig{Epochs: openEpochs(r.t, EpochConfig{File: r.file, Copy: r.copy, Every: time.Millisecond})}, stack.Tier{Name: "nvme", Store: r.disk})
	if err != nil {
		r.t.Fatal(err)
	}
	return newClient(r.t, r.dir)
}

// found is how much a client finds of a block.
func found(t *testing.T, c *Client, f *kvcache.Frame) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	m, err := c.Longest(ctx, kvcache.Query{Space: f.Space, IDs: f.IDs})
	if err != nil {
		t.Fatal(err)
	}
	return len(m.Blocks)
}

// knownAs is what the node knows of a model of which it was told a name.
func knownAs(t *testing.T, c *Client, name string) (of []Known) {
	t.Helper()
	list, err := c.Known(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range list {
		if k.Label.Model == name {
			of = append(of, k)
		}
	}
	return of
}

// TestDropOwed: what was dropped while a tier was away is not served when it is back, by the
// next process and after the loss of the memory neither, is known by its name all the time,
// and goes from the tier.
func TestDropOwed(t *testing.T) {
	for name, lose := range map[string]func(*dropRig){
		"process": func(*dropRig) {},
		"memory": func(r *dropRig) {
			if err := os.Remove(r.file); err != nil {
				t.Fatal(err)
			}
			r.dir = nodeDir(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
			if err != nil {
				t.Fatal(err)
			}
			defer disk.Close()
			r := &dropRig{t: t, disk: undropped{disk, &atomic.Bool{}}, file: filepath.Join(t.TempDir(), "e"), copy: filepath.Join(t.TempDir(), "c"), dir: nodeDir(t)}
			c := r.start()
			frames, _ := farChain(t, 1)
			f := frames[0]
			if err := errors.Join(c.Label(t.Context(), f.Fingerprint, kvcache.Label{Model: "m"}), c.Put(t.Context(), f)); err != nil {
				t.Fatal(err)
			}
			settle(r.n)
			r.disk.away.Store(true)
			if err := c.Drop(t.Context(), f.Fingerprint); err == nil {
				t.Fatal("a drop that a tier could not do is no error")
			}
			for text := ""; text == ""; <-time.After(time.Millisecond) { // until the copy has it
				if file, err := readEpochs(r.copy); err == nil && len(file.Owed) == 1 {
					text = fmt.Sprint(file)
				}
			}
			r.n.end()
			lose(r)
			c = r.start()
			defer func() { r.n.end() }()
			k := knownAs(t, c, "m")
			if len(k) != 1 || k[0].Fingerprint != f.Fingerprint || len(k[0].Owed) != 1 || found(t, c, f) != 0 {
				t.Fatalf("known: %+v, or it is found", k)
			}
			if s, err := c.Survey(t.Context(), false, func(Survey) {}); err != nil || s.Tiers[1].Models[0].Label.Model != "m" {
				t.Errorf("the survey has %+v, %v", s, err)
			}
			if err := c.Drop(t.Context(), f.Fingerprint); err == nil {
				t.Error("the tier is away, and a second drop is done")
			}
			r.disk.away.Store(false)
			for len(knownAs(t, c, "m")[0].Owed) > 0 {
				<-time.After(time.Millisecond)
			}
			if _, err := disk.Get(t.Context(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) || found(t, c, f) != 0 {
				t.Errorf("it is still on the disk: %v", err)
			}
			if err := c.Drop(t.Context(), knownAs(t, c, "m")[0].Fingerprint); err != nil {
				t.Errorf("by its name once more: %v", err)
			}
			if err := c.Put(t.Context(), f); err != nil || found(t, c, f) != 1 {
				t.Errorf("what is computed anew is not found: %v", err)
			}
		})
	}
}

// TestKeptLater: what there was no room to write is written when there is, as soon as somebody
// asks for it again, who is told before that it is not kept, and else by itself.
func TestKeptLater(t *testing.T) {
	s, err := stack.New(stack.Config{Near: undropped{}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	one, first := version("1")
	s.Owe(stack.Owed{Tier: "redis", Fingerprint: one.Fingerprint})
	drop := func(e *Epochs) error { return e.keepOwed(s) }
	label := func(e *Epochs) error { return e.announce(one.Fingerprint, first, time.Now()) }
	set := func(e *Epochs) error { _, err := e.Set(first.Model, first.Weights); return err }
	background := func(e *Epochs) error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go e.run(ctx, nil, nil)
		synctest.Wait()
		return nil
	}
	for name, c := range map[string]struct {
		keep, again  func(*Epochs) error
		owed, epochs int
	}{
		"a drop":           {drop, drop, 1, 0},
		"a label":          {label, label, 0, 1},
		"an epoch":         {set, set, 0, 1},
		"a drop by itself": {drop, background, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "full")
				e := openEpochs(t, EpochConfig{File: filepath.Join(dir, "e")})
				for range 2 { // the second one changes nothing in memory
					if err := c.keep(e); err == nil {
						t.Error("what is not kept was acknowledged")
					}
				}
				if err := errors.Join(os.Mkdir(dir, 0o700), c.again(e)); err != nil {
					t.Fatal(err)
				}
				if file, err := readEpochs(e.cfg.File); err != nil || len(file.Owed) != c.owed || len(file.Epochs) != c.epochs {
					t.Errorf("the file has %+v, %v", file, err)
				}
			})
		})
	}
}

// TestKnownOnDisk: a model of which there is only a disk is known by the name and the
// fingerprint that are there.
func TestKnownOnDisk(t *testing.T) {
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	frames, _ := farChain(t, 1)
	space, _ := version("1")
	other, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1}}, []kvcache.Part{{Size: 10}}, make([]byte, 10))
	if err := errors.Join(err, disk.Label(t.Context(), frames[0].Fingerprint, kvcache.Label{Model: "m"}), disk.Put(t.Context(), frames[0]), disk.Put(t.Context(), other)); err != nil {
		t.Fatal(err)
	}
	_, c := startFar(t, stack.Tier{Name: "nvme", Store: disk})
	if k := knownAs(t, c, "m"); len(k) != 1 || k[0].Fingerprint != frames[0].Fingerprint || k[0].Blocks != 0 {
		t.Errorf("%+v", k)
	}
	if k := knownAs(t, c, ""); len(k) != 1 || k[0].Fingerprint != other.Fingerprint {
		t.Errorf("without a name: %+v", k)
	}
}

// TestNamesBounded: the newest names are kept, each once, and none that is too long.
func TestNamesBounded(t *testing.T) {
	e := openEpochs(t, EpochConfig{File: filepath.Join(t.TempDir(), "e")})
	e.mu.Lock()
	for i := range mostModelNames + 10 {
		n := modelName{kvcache.Fingerprint{byte(i), byte(i >> 8)}, "m"}
		if !e.nameLocked(n) || e.nameLocked(n) {
			t.Fatalf("name %d", i)
		}
	}
	if e.nameLocked(modelName{Model: string(make([]byte, mostModelName+1))}) || len(e.names) != mostModelNames || len(e.has) != len(e.names) {
		t.Errorf("%d names", len(e.names))
	}
	last := e.names[len(e.names)-1]
	e.mu.Unlock()
	e.nameModel(kvcache.Fingerprint{1}, "another")
	if names := openEpochs(t, e.cfg).named(); names[last.Fingerprint] == nil || names[kvcache.Fingerprint{1}][0] != "another" {
		t.Errorf("read again: %d names", len(names))
	}
}
