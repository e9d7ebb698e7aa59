package s3tier

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvmesh/kvmesh/internal/s3link"
	"github.com/kvmesh/kvmesh/internal/s3test"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/remote"
	"github.com/kvmesh/kvmesh/kvcache/sealed/sealedtest"
)

// endpointEnv tells children of the suite, and its opener, where the server is.
const endpointEnv = "S3TIER_TEST_ENDPOINT"

const bucket = "kvblocks"

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	os.Exit(m.Run())
}

// config is a store on a test's server.
func config(endpoint, prefix string) Config {
	return Config{
		S3:     s3link.Config{Endpoint: endpoint, Region: s3test.Region, AccessKey: s3test.AccessKey, SecretKey: s3test.SecretKey},
		Bucket: bucket, Prefix: prefix,
		// Nothing is late on a busy machine.
		Timeout: time.Minute, PutTimeout: time.Minute,
	}
}

// openForSuite opens a store as kvtest asks for it: a prefix for each folder.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	cfg := config(os.Getenv(endpointEnv), filepath.Base(dir))
	// Small, so that many blocks are read in several ranges.
	cfg.Limit, cfg.PartSize = limit, 150_000
	if os.Getenv(sealedtest.Env) != "" {
		cfg.Form = kvcache.Encrypted
	}
	s, err := Open(cfg)
	if err == nil {
		err = s.Survey(context.Background())
	}
	if err != nil || cfg.Form == kvcache.Plain {
		return s, err
	}
	return sealedtest.Wrap(s, nil)
}

// serve starts a server with a bucket, and waits until it takes objects.
func serve(t *testing.T) *s3test.Server {
	t.Helper()
	server := s3test.StartServer(t)
	t.Setenv(endpointEnv, server.Endpoint)
	server.MakeBucket(bucket)
	return server
}

// tamper changes an object behind a store's back.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	s, err := Open(config(os.Getenv(endpointEnv), filepath.Base(dir)))
	if err != nil {
		return err
	}
	defer s.Close()
	ctx := context.Background()
	if os.Getenv(sealedtest.Env) != "" {
		ref = sealedtest.Ref(ref)
	}
	path, err := s.path(ctx, ref)
	if err != nil || path == "" {
		return errors.Join(err, errors.New("no block"))
	}
	o, err := s.core.Client.GetObject(ctx, bucket, path, minio.GetObjectOptions{})
	if err != nil {
		return err
	}
	b, err := io.ReadAll(o)
	if err != nil {
		return err
	}
	b = change(b)
	_, err = s.core.Client.PutObject(ctx, bucket, path, bytes.NewReader(b), int64(len(b)), minio.PutObjectOptions{})
	return err
}

// TestServer runs what needs a real server on one, because it takes seconds to start. The
// last one kills it.
func TestServer(t *testing.T) {
	server := serve(t)
	t.Run("Suite", func(t *testing.T) {
		// The server is slow: a crash costs it a second.
		kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Lags: true, Tamper: tamper, Kills: 3, Ranged: true})
	})
	t.Run("Sealed", func(t *testing.T) {
		t.Setenv(sealedtest.Env, "1")
		kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Lags: true, Tamper: tamper, Kills: 2})
	})
	t.Run("Ranges", func(t *testing.T) { testRanges(t, server.Endpoint) })
	t.Run("Life", func(t *testing.T) { testLife(t, server.Endpoint) })
	t.Run("ForeignObjects", func(t *testing.T) { testForeignObjects(t, server.Endpoint) })
	t.Run("Dies", func(t *testing.T) { testServerDies(t, server) })
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
func sealed(t testing.TB, space kvcache.Space, parent kvcache.Key, first int, ids []int32, size int) *kvcache.Frame {
	t.Helper()
	payload := make([]byte, size)
	_, _ = rand.NewChaCha8(space.Key(parent, ids)).Read(payload) // never fails
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: first, IDs: ids}, []kvcache.Part{{Size: int64(size)}}, payload)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// put stores blocks.
func put(t testing.TB, s *Store, frames ...*kvcache.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}

// holds checks that a store has a block, whole and right.
func holds(t testing.TB, s *Store, f *kvcache.Frame) {
	t.Helper()
	l, err := s.Get(t.Context(), f.Ref)
	if err != nil {
		t.Error(err)
		return
	}
	defer l.Release()
	if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
		t.Errorf("the block is another: %v", err)
	}
}

func TestConfig(t *testing.T) {
	s3 := s3link.Config{Endpoint: "http://h"}
	for name, cfg := range map[string]Config{
		"no bucket": {S3: s3}, "bucket": {S3: s3, Bucket: "B"}, "limit": {S3: s3, Bucket: "bucket", Limit: -1}, "part": {S3: s3, Bucket: "bucket", PartSize: 1},
		"endpoint": {S3: s3link.Config{Endpoint: "h:1"}, Bucket: "bucket"}, "prefix": {S3: s3, Bucket: "bucket", Prefix: strings.Repeat("x", 300)},
	} {
		if s, err := Open(cfg); err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// front is a proxy in front of a server that counts and spoils what passes.
type front struct {
	url    string
	gets   atomic.Int64
	bytes  atomic.Int64
	hang   atomic.Bool
	cut    atomic.Int64 // bytes of a body after which a connection ends; 0 = none
	closed chan struct{}
}

// inFront starts one.
func inFront(t *testing.T, endpoint string) *front {
	t.Helper()
	f := &front{closed: make(chan struct{})}
	target, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	// The signature covers the host: it stays that of the proxy.
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", target.Host }}
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.hang.Load() {
			<-f.closed
			return
		}
		if r.Method == http.MethodGet && r.Header.Get("Range") != "" {
			f.gets.Add(1)
		}
		proxy.ServeHTTP(&counted{ResponseWriter: w, f: f}, r)
	}))
	f.url = srv.URL
	t.Cleanup(func() {
		close(f.closed)
		srv.Close()
	})
	return f
}

// counted counts and cuts a body.
type counted struct {
	http.ResponseWriter
	f    *front
	sent int64
}

// Write implements http.ResponseWriter.
func (c *counted) Write(b []byte) (int, error) {
	if cut := c.f.cut.Load(); cut > 0 && c.sent+int64(len(b)) > cut {
		panic(http.ErrAbortHandler)
	}
	c.sent += int64(len(b))
	c.f.bytes.Add(int64(len(b)))
	return c.ResponseWriter.Write(b)
}

// testRanges: a large block is read by ranges, all of them once, and a look-up reads
// headers only, and those once.
func testRanges(t *testing.T, endpoint string) {
	f := inFront(t, endpoint)
	cfg := config(f.url, "ranges")
	cfg.PartSize = 1 << 20
	space := kvcache.NewSpace("m", nil)
	ids := []int32{1, 2, 3, 4}
	first := sealed(t, space, space.Root, 0, ids[:2], 5<<20)
	second := sealed(t, space, first.Key, 2, ids[2:], 3<<20)
	put(t, newStore(t, cfg), first, second)

	s := newStore(t, cfg) // knows nothing
	for range 2 {
		m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
		if err != nil || len(m.Blocks) != 2 || m.Blocks[0].Size != first.Total {
			t.Fatalf("%+v, %v", m, err)
		}
	}
	if gets, sent := f.gets.Swap(0), f.bytes.Swap(0); gets != 2 || sent > 100_000 {
		t.Errorf("%d ranges and %d bytes for headers", gets, sent)
	}
	holds(t, s, first)
	if gets, sent := f.gets.Load(), f.bytes.Load(); gets != 6 || sent < first.Total || sent > first.Total+10_000 {
		t.Errorf("%d ranges and %d bytes for a block of %d", gets, sent, first.Total)
	}
	// A connection that ends in the middle is a miss, not half a block.
	f.cut.Store(500_000)
	if l, err := s.Get(t.Context(), first.Ref); err == nil {
		l.Release()
		t.Error("served what was cut")
	}
	f.cut.Store(0)
	holds(t, s, first)
}

// TestServerHangs: a server that takes connections and says nothing costs no more than the
// caller's budget, is counted, and soon nothing at all.
func TestServerHangs(t *testing.T) {
	f := inFront(t, "http://127.0.0.1:1")
	f.hang.Store(true)
	cfg := config(f.url, "hangs")
	cfg.Timeout, cfg.PutTimeout, cfg.Away = 400*time.Millisecond, 400*time.Millisecond, time.Hour
	s := newStore(t, cfg)
	space := kvcache.NewSpace("m", nil)
	block := sealed(t, space, space.Root, 0, []int32{1}, 1000)
	calls := map[string]func(context.Context) error{
		"get": func(ctx context.Context) error { _, err := s.Get(ctx, block.Ref); return err },
		"put": func(ctx context.Context) error { return s.Put(ctx, block) },
		"longest": func(ctx context.Context) error {
			_, err := s.Longest(ctx, kvcache.Query{Space: space, IDs: block.IDs})
			return err
		},
	}
	for name, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	if st := s.Stats(); st.Late != 3 || st.Failed != 0 {
		t.Errorf("%d late and %d failed, want 3 and 0", st.Late, st.Failed)
	}
	for name, call := range calls {
		if err := call(t.Context()); !errors.Is(err, remote.ErrAway) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// testServerDies kills the server with SIGKILL in the middle of writes and starts it
// again: what it has, it has whole, and it takes blocks again.
func testServerDies(t *testing.T, server *s3test.Server) {
	cfg := config(server.Endpoint, "dies")
	cfg.Away = 10 * time.Millisecond
	s := newStore(t, cfg)
	space := kvcache.NewSpace("m", nil)
	done := make(chan []*kvcache.Frame)
	half := make(chan struct{})
	go func() {
		var acked []*kvcache.Frame
		failed := 0
		for i := int32(0); failed < 5 && t.Context().Err() == nil; i++ {
			f := sealed(t, space, space.Root, 0, []int32{i}, 200_000)
			if s.Put(t.Context(), f) == nil {
				acked = append(acked, f)
			} else {
				failed++
			}
			if i == 20 {
				close(half)
			}
		}
		done <- acked
	}()
	<-half
	server.Kill()
	acked := <-done
	if _, err := s.Get(t.Context(), acked[0].Ref); err == nil || errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("no server: %v", err)
	}
	server.Start()
	server.MakeBucket(bucket)
	lost := 0
	for _, f := range acked {
		err := errors.New("not tried")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for err != nil && !errors.Is(err, kvcache.ErrNotFound) && ctx.Err() == nil {
			var l *kvcache.Lent
			if l, err = s.Get(ctx, f.Ref); err == nil {
				if err := l.Verify(); err != nil || !bytes.Equal(l.Bytes(), f.Bytes()) {
					t.Errorf("a block is wrong: %v", err)
				}
				l.Release()
			} else if _, refused := errors.AsType[*kvcache.Refusal](err); refused {
				t.Fatalf("half of a block was visible: %v", err)
			}
		}
		cancel()
		if errors.Is(err, kvcache.ErrNotFound) {
			lost++ // acknowledged, and not yet on the server's disk
		} else if err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d blocks acknowledged, %d lost", len(acked), lost)
	again := sealed(t, space, space.Root, 0, []int32{-1}, 200_000)
	put(t, s, again)
	holds(t, s, again)
}

// testLife: what is old goes at a survey, but for what was used or made new.
func testLife(t *testing.T, endpoint string) {
	cfg := config(endpoint, "life")
	s := newStore(t, cfg)
	space := kvcache.NewSpace("m", nil)
	old, used := sealed(t, space, space.Root, 0, []int32{1}, 1000), sealed(t, space, space.Root, 0, []int32{2}, 1000)
	put(t, s, old, used)
	found, err := s.list(t.Context(), cfg.Prefix+"/", 0)
	if err != nil || len(found) != 2 {
		t.Fatalf("%d objects, %v", len(found), err)
	}
	path := s.memory.path(used.Key)
	before := time.Now().Truncate(time.Second)
	if err := s.refresh(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if found, err = s.list(t.Context(), path, 0); err != nil || len(found) != 1 || found[0].stored.Before(before) {
		t.Errorf("not made new: %+v, %v", found, err)
	}
	holds(t, s, used)
	// What another process knows of them: when they were written.
	other := newStore(t, cfg)
	if found, err = other.list(t.Context(), cfg.Prefix+"/", 0); err != nil {
		t.Fatal(err)
	}
	for i, o := range found {
		if o.Key == old.Key {
			found[i].stored = o.stored.Add(-other.cfg.TTL)
		}
	}
	expired, evict := other.choose(found, 1<<30, time.Now().Add(time.Minute))
	if len(expired) != 1 || expired[0].Key != old.Key || len(evict) != 0 {
		t.Errorf("%+v expired, %+v evicted", expired, evict)
	}
	if err := other.removeAll(t.Context(), expired); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), old.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("what expired: %v", err)
	}
	holds(t, other, used)
}

// TestChoose: the longest unused first, children before parents.
func TestChoose(t *testing.T) {
	s := &Store{cfg: Config{TTL: time.Hour}, memory: newMemory()}
	now := time.Now()
	key := func(b byte) kvcache.Key { return kvcache.Key{b} }
	block := func(k, parent byte, first int, age time.Duration) object {
		return object{parent: key(parent), Entry: remote.Entry{Key: key(k), First: first}, size: 10, stored: now.Add(-age)}
	}
	// 1 is the oldest, but 3 is its grandchild and young; 4 is alone.
	found := []object{block(1, 0, 0, 50*time.Minute), block(2, 1, 4, 40*time.Minute), block(3, 2, 8, time.Minute), block(4, 0, 0, 30*time.Minute), block(5, 2, 8, 20*time.Minute)}
	s.memory.learn(key(5), "p", nil) // used by this process now
	for most, want := range map[int64]string{50: "", 40: "4", 30: "43", 20: "435", 10: "4352", 0: "43521"} {
		_, evict := s.choose(slices.Clone(found), most, now)
		var got []byte
		for _, o := range evict {
			got = append(got, '0'+o.Key[0])
		}
		if string(got) != want {
			t.Errorf("at most %d bytes: %q go, want %q", most, got, want)
		}
	}
	found[3].stored = now.Add(-2 * time.Hour)
	if old, evict := s.choose(found, 50, now); len(old) != 1 || old[0].Key != key(4) || len(evict) != 0 {
		t.Errorf("%+v are too old, %+v go", old, evict)
	}
}

// testForeignObjects: what is not ours is not touched.
func testForeignObjects(t *testing.T, endpoint string) {
	cfg := config(endpoint, "foreign")
	cfg.Limit = 1 << 20
	s := newStore(t, cfg)
	ctx := t.Context()
	for _, path := range []string{"foreign/readme", "foreign/a/b/c", "other/x"} {
		if _, err := s.core.Client.PutObject(ctx, bucket, path, strings.NewReader("x"), 1, minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	space := kvcache.NewSpace("m", nil)
	for i := range int32(5) {
		put(t, s, sealed(t, space, space.Root, 0, []int32{i}, 300_000))
	}
	if err := s.Drop(ctx, space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"foreign/readme", "foreign/a/b/c", "other/x"} {
		if _, err := s.core.StatObject(ctx, bucket, path, minio.StatObjectOptions{}); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if st := s.Stats(); st.Evictions == 0 {
		t.Error("the test made no room")
	}
	// A bucket that is not there is no miss.
	cfg.Bucket = "nosuch"
	if _, err := newStore(t, cfg).Get(ctx, sealed(t, space, space.Root, 0, []int32{1}, 10).Ref); err == nil || errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("no bucket: %v", err)
	}
}
