package redistier

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/remote"
	"github.com/kvmesh/kvmesh/kvcache/sealed/sealedtest"
)

// clusterEnv tells children of the suite, and its opener, where the cluster is.
const clusterEnv = "REDISTIER_TEST_CLUSTER"

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	os.Exit(m.Run())
}

// suiteConfig is the store of a folder: one with a prefix of its own.
func suiteConfig(dir string, limit int64) Config {
	return Config{
		Redis: redislink.Config{URL: os.Getenv(clusterEnv), Timeout: 20 * time.Second}, Prefix: filepath.Base(dir), Limit: limit,
		// Small, so that most blocks have several; and nothing is late on a busy machine.
		PartSize: 150_000, Timeout: 30 * time.Second, PutTimeout: 30 * time.Second,
	}
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	cfg := suiteConfig(dir, limit)
	if os.Getenv(sealedtest.Env) == "" {
		return Open(cfg)
	}
	cfg.Form = kvcache.Encrypted
	return sealedtest.Wrap(Open(cfg))
}

// tamperer changes blocks behind a store's back: manifest and parts, so that only what is
// in them tells.
func tamperer(t *testing.T) func(string, kvcache.Ref, func([]byte) []byte) error {
	c, err := redislink.OpenCluster(redislink.Config{URL: os.Getenv(clusterEnv)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	ctx := context.Background()
	return func(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
		k := keys{filepath.Base(dir)}
		form := kvcache.Plain
		if os.Getenv(sealedtest.Env) != "" {
			form, ref = kvcache.Encrypted, sealedtest.Ref(ref)
		}
		text, err := c.Get(ctx, k.manifest(ref.Key)).Bytes()
		if err != nil {
			return err
		}
		m, err := parseManifest(text, form)
		if err != nil {
			return err
		}
		var frame []byte
		for i := range m.parts() {
			b, err := c.Get(ctx, k.part(ref.Key, m.nonce, i)).Bytes()
			if err != nil {
				return err
			}
			frame = append(frame, b...)
		}
		head := int(m.header.Len)
		frame = change(bytes.Clone(frame))
		changed := m
		changed.header.Total = int64(len(frame))
		if err := c.Set(ctx, k.manifest(ref.Key), changed.encode(frame[:min(head, len(frame))]), time.Hour).Err(); err != nil {
			return err
		}
		for i := range max(m.parts(), changed.parts()) {
			from := min(int64(i)*m.part, int64(len(frame)))
			to := min(from+m.part, int64(len(frame)))
			if err := c.Set(ctx, k.part(ref.Key, m.nonce, i), frame[from:to], time.Hour).Err(); err != nil {
				return err
			}
		}
		return nil
	}
}

// startCluster runs a cluster that nobody declares dead by mistake.
func startCluster(t *testing.T) *redistest.Cluster {
	t.Helper()
	c := redistest.StartCluster(t, time.Minute)
	t.Setenv(clusterEnv, c.URL())
	return c
}

func TestStore(t *testing.T) {
	startCluster(t)
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Tamper: tamperer(t), Ranged: true})
}

// TestSealed: the same with encryption before it.
func TestSealed(t *testing.T) {
	startCluster(t)
	t.Setenv(sealedtest.Env, "1")
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Tamper: tamperer(t), Kills: 5})
}

// newStore opens a store until the test ends.
func newStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sealed makes a block of tokens behind a parent, with random content.
func sealed(t testing.TB, space kvcache.Space, parent kvcache.Key, ids []int32, size int) *kvcache.Frame {
	t.Helper()
	payload := make([]byte, size)
	key := space.Key(parent, ids)
	_, _ = rand.NewChaCha8(key).Read(payload) // never fails
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, IDs: ids}, []kvcache.Part{{Size: int64(size)}}, payload)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestConfig(t *testing.T) {
	url := redislink.Config{URL: "redis://h"}
	for name, cfg := range map[string]Config{
		"no URL": {}, "limit": {Redis: url, Limit: -1}, "part": {Redis: url, PartSize: -1}, "timeout": {Redis: url, Timeout: -1},
		"life": {Redis: url, TTL: time.Millisecond}, "prefix": {Redis: url, Prefix: "a{b}"},
	} {
		if s, err := Open(cfg); err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// TestSingle: one server without a cluster will do.
func TestSingle(t *testing.T) {
	s := newStore(t, Config{Redis: redislink.Config{URL: redistest.Start(t).URL()}, Single: true})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, []int32{1, 2}, 10_000_000) // three parts
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	l, err := s.Get(t.Context(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Error("the block is another")
	}
	m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: []int32{1, 2, 3}})
	if err != nil || m.Tokens() != 2 || m.Blocks[0].Size != f.Total {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestEverythingHasALife: no key of a store stays for ever, whatever happens to its users.
func TestEverythingHasALife(t *testing.T) {
	cluster := startCluster(t)
	cfg := suiteConfig("life", 1<<30)
	cfg.TTL = time.Hour
	s := newStore(t, cfg)
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, []int32{1}, 400_000)
	if err := s.Put(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	check := func() (keys int) {
		t.Helper()
		err := cluster.Each(t.Context(), func(n *redistest.Server) error {
			list, err := n.Client.Keys(t.Context(), "life:[bc]:*").Result()
			for _, key := range list {
				ttl := n.Client.PTTL(t.Context(), key).Val()
				if keys++; ttl < 50*time.Minute || ttl > time.Hour {
					t.Errorf("%s lives for %v", key, ttl)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return keys
	}
	if n := check(); n != 5 {
		t.Errorf("%d keys, want a manifest, three parts and a name", n)
	}
	// Use gives what is old its life anew, to the manifest, the parts and the name.
	b := parsed(t, s, f.Key)
	for _, key := range append(s.keys.all(&b.manifest), s.keys.children(f.Parent)) {
		if err := s.client.PExpire(t.Context(), key, time.Minute).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: f.IDs}); err != nil {
		t.Fatal(err)
	}
	s.flush(t.Context())
	check()
}

// parsed reads a block's manifest.
func parsed(t *testing.T, s *Store, key kvcache.Key) block {
	t.Helper()
	b, err := s.look(t.Context(), []kvcache.Key{key})
	if err != nil || b[0].text == nil || b[0].err != nil {
		t.Fatalf("no good manifest: %+v, %v", b, err)
	}
	return b[0]
}

// TestServerForgets: what a server evicts by itself is a miss, or refused, and leaves no
// name behind; after that the block can be put again.
func TestServerForgets(t *testing.T) {
	startCluster(t)
	space := kvcache.NewSpace("m", nil)
	for name, victim := range map[string]func(*Store, block) string{
		"manifest": func(s *Store, b block) string { return s.keys.manifest(b.key) },
		"part":     func(s *Store, b block) string { return s.keys.part(b.key, b.nonce, 1) },
		"name":     func(s *Store, b block) string { return s.keys.children(b.header.Parent) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, suiteConfig("forgets"+name, 1<<30))
			first := sealed(t, space, space.Root, []int32{1}, 400_000)
			second, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: first.Key, First: 1, IDs: []int32{2}}, []kvcache.Part{{Size: 5}}, []byte("12345"))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range []*kvcache.Frame{first, second} {
				if err := s.Put(t.Context(), f); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.client.Del(t.Context(), victim(s, parsed(t, s, first.Key))).Err(); err != nil {
				t.Fatal(err)
			}
			if l, err := s.Get(t.Context(), first.Ref); name != "name" && err == nil {
				l.Release()
				t.Error("served without it")
			}
			m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: []int32{1, 2}})
			if err != nil || len(m.Blocks) != 0 {
				t.Errorf("%d blocks, %v", len(m.Blocks), err)
			}
			s.flush(t.Context())
			if err := s.Put(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			m, err = s.Longest(t.Context(), kvcache.Query{Space: space, IDs: []int32{1, 2}})
			if err != nil || len(m.Blocks) != 2 {
				t.Errorf("%d blocks after another put, %v", len(m.Blocks), err)
			}
		})
	}
}

// TestSweep: what nobody used for its life goes out of the count.
func TestSweep(t *testing.T) {
	startCluster(t)
	s := newStore(t, suiteConfig("sweep", 1<<30))
	space := kvcache.NewSpace("m", nil)
	old, fresh := sealed(t, space, space.Root, []int32{1}, 1000), sealed(t, space, space.Root, []int32{2}, 1000)
	for _, f := range []*kvcache.Frame{old, fresh} {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	used := s.Stats().Used
	z := redis.Z{Member: member(old.Fingerprint, old.Key), Score: 1}
	if err := s.client.ZAdd(t.Context(), s.keys.lru()[0], z).Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	st := s.Stats()
	if st.Expired != 1 || st.Used <= 0 || st.Used >= used {
		t.Errorf("%d expired, %d bytes in use of %d", st.Expired, st.Used, used)
	}
	if _, err := s.Get(t.Context(), old.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("what expired: %v", err)
	}
}

// TestWide: a parent with more children than a page. The best of them are found.
func TestWide(t *testing.T) {
	startCluster(t)
	s := newStore(t, suiteConfig("wide", 1<<30))
	space := kvcache.NewSpace("m", nil)
	ids := func(i int32) []int32 { return []int32{7, 7, i / 100, i % 100, 5, 6} }
	want := sealed(t, space, space.Root, ids(1042), 100)
	for _, f := range []*kvcache.Frame{want, sealed(t, space, space.Root, ids(301), 100)} {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	// Names are enough of the others.
	err := s.pipe(t.Context(), func(p redis.Pipeliner) {
		for i := range int32(1500) {
			h := kvcache.Header{Ref: space.Child(space.Root, ids(i)), IDs: ids(i)}
			p.ZAdd(t.Context(), s.keys.children(space.Root), redis.Z{Member: remote.EntryOf(&h).Name()})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time it is known to be wide
		m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: append(ids(1042), 9)})
		if err != nil || len(m.Blocks) != 1 || m.Blocks[0].Ref != want.Ref {
			t.Errorf("%+v, %v", m, err)
		}
		m, err = s.Longest(t.Context(), kvcache.Query{Space: space, IDs: []int32{7, 7, 3, 1, 5}})
		if err != nil || len(m.Blocks) != 0 || m.Common != 5 {
			t.Errorf("%+v, %v", m, err)
		}
	}
}
