package modelstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// origin serves files over HTTP and misbehaves as a test says.
type origin struct {
	*httptest.Server
	mu       sync.Mutex
	files    map[string][]byte // by path
	cut      int               // bytes after which a connection is cut, 0 = never
	noRange  bool              // knows no ranges
	status   int               // answers so, once
	requests []string          // path and Range
	sent     int               // bytes of bodies
}

func newOrigin(t testing.TB) *origin {
	o := &origin{files: map[string][]byte{}}
	o.Server = httptest.NewServer(o)
	t.Cleanup(o.Close)
	return o
}

func (o *origin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	body, ok := o.files[r.URL.Path]
	o.requests = append(o.requests, strings.TrimSpace(r.URL.Path+" "+r.Header.Get("Range")))
	cut, noRange, status := o.cut, o.noRange, o.status
	o.status = 0
	o.mu.Unlock()
	if status != 0 {
		w.WriteHeader(status)
		return
	}
	if !ok {
		http.NotFound(w, r)
		return
	}
	from := 0
	if v, ok := strings.CutPrefix(r.Header.Get("Range"), "bytes="); ok && !noRange {
		from, _ = strconv.Atoi(strings.TrimSuffix(v, "-"))
		if from >= len(body) {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
		w.Header().Set("Content-Length", strconv.Itoa(len(body)-from))
		w.WriteHeader(http.StatusPartialContent)
	}
	rest := body[from:]
	if cut > 0 && cut < len(rest) {
		rest = rest[:cut]
	}
	n, _ := w.Write(rest)
	o.mu.Lock()
	o.sent += n
	o.mu.Unlock()
	if len(rest) < len(body)-from {
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

// set changes how it behaves.
func (o *origin) set(change func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change()
}

// asked returns and forgets the requests.
func (o *origin) asked() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := strings.Join(o.requests, "; ")
	o.requests = nil
	return out
}

// randomBytes are the same for the same seed.
func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = r.Read(b)
	return b
}

// describe makes a manifest of files.
func describe(name, version string, files map[string][]byte) Manifest {
	m := Manifest{Name: name, Version: version}
	for path, b := range files {
		h := sha256.Sum256(b)
		m.Files = append(m.Files, File{Path: path, Size: int64(len(b)), SHA256: hex.EncodeToString(h[:])})
	}
	m.Main = m.Files[0].Path
	return m
}

// publish puts a model on the server and returns the URL of its manifest.
func (o *origin) publish(t testing.TB, name, version string, files map[string][]byte) string {
	t.Helper()
	raw, err := json.Marshal(describe(name, version, files))
	if err != nil {
		t.Fatal(err)
	}
	at := "/" + name + "/" + version + "/"
	o.set(func() {
		for path, b := range files {
			o.files[at+path] = b
		}
		o.files[at+"manifest.json"] = raw
	})
	return o.URL + at + "manifest.json"
}

// holds fails when a model in the store has other files than these.
func holds(t *testing.T, m Model, files map[string][]byte) {
	t.Helper()
	for path, want := range files {
		got, err := os.ReadFile(filepath.Join(m.Dir, path))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s differs: %v", path, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(m.Dir, "*"+partSuffix))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestPullOverHTTP(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"model.gguf": randomBytes(1, 300_000), "sub/LICENSE": []byte("MIT"), "empty": nil}
	url := o.publish(t, "m", "v1", files)
	var last, total int64
	var mu sync.Mutex
	m, err := s.Pull(t.Context(), Sources{}, url, func(d, n int64) {
		mu.Lock()
		defer mu.Unlock()
		last, total = max(last, d), n
	})
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	if last != 300_003 || total != 300_003 {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	o.asked()
	if _, err := s.Pull(t.Context(), Sources{}, url, nil); err != nil || o.asked() != "/m/v1/manifest.json" {
		t.Errorf("a second pull: %v", err)
	}
	if _, err := s.Verify(t.Context(), Ref{"m", "v1"}); err != nil {
		t.Error(err)
	}
	// The next version beside it, while the first is in use.
	next := map[string][]byte{"model.gguf": randomBytes(2, 1000)}
	if m2, err := s.Pull(t.Context(), Sources{}, o.publish(t, "m", "v2", next), nil); err != nil {
		t.Error(err)
	} else {
		holds(t, m2, next)
	}
	holds(t, m, files)
	list, err := s.List()
	if err != nil || len(list) != 2 || list[0].Version != "v1" || list[0].State != StateReady || list[0].Bytes != 300_003 || list[0].Files != 3 {
		t.Errorf("%+v, %v", list, err)
	}
}

// A server that cuts every connection is read to the end, and no byte is sent twice.
func TestPullOverCutConnections(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"model.gguf": randomBytes(3, 500_000)}
	url := o.publish(t, "m", "v1", files)
	o.set(func() { o.cut = 70_000 })
	m, err := s.Pull(t.Context(), Sources{}, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	if n := strings.Count(o.asked(), "model.gguf"); n < 8 {
		t.Errorf("%d connections", n)
	}
	// A part of what was sent before each cut may have been lost on the way.
	if o.sent > 600_000+4096 {
		t.Errorf("%d bytes were sent for 500000", o.sent)
	}
}

// What a killed pull left is taken up, also by a server without ranges.
func TestPullGoesOn(t *testing.T) {
	for _, noRange := range []bool{false, true} {
		o, s := newOrigin(t), Open(t.TempDir())
		files := map[string][]byte{"model.gguf": randomBytes(4, 200_000)}
		url := o.publish(t, "m", "v1", files)
		// As a process leaves it that dies between two writes.
		staging := s.staging(Ref{"m", "v1"})
		if err := os.MkdirAll(staging, 0o755); err != nil {
			t.Fatal(err)
		}
		part := filepath.Join(staging, "model.gguf"+partSuffix)
		if err := os.WriteFile(part, files["model.gguf"][:150_000], 0o644); err != nil {
			t.Fatal(err)
		}
		if list, err := s.List(); err != nil || len(list) != 1 || list[0].State != StatePartial || list[0].Bytes != 150_000 {
			t.Errorf("%+v, %v", list, err)
		}
		if _, err := s.Find(Ref{"m", "v1"}); !errors.Is(err, ErrMissing) {
			t.Errorf("half a model was found: %v", err)
		}
		o.set(func() { o.noRange = noRange })
		m, err := s.Pull(t.Context(), Sources{}, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		holds(t, m, files)
		if want := "/m/v1/manifest.json; /m/v1/model.gguf bytes=150000-"; o.asked() != want {
			t.Errorf("not asked for the rest")
		}
		if list, err := s.List(); err != nil || len(list) != 1 || list[0].State != StateReady {
			t.Errorf("%+v, %v", list, err)
		}
	}
}

// A part of another file is noticed at the end, and fetched from the beginning.
func TestPullOverAWrongPart(t *testing.T) {
	for name, left := range map[string][]byte{
		"other bytes": randomBytes(9, 50_000), "too long": randomBytes(9, 300_000), "all of another": randomBytes(9, 100_000),
	} {
		o, s := newOrigin(t), Open(t.TempDir())
		files := map[string][]byte{"model.gguf": randomBytes(5, 100_000)}
		url := o.publish(t, "m", "v1", files)
		staging := s.staging(Ref{"m", "v1"})
		if err := os.MkdirAll(staging, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(staging, "model.gguf"+partSuffix), left, 0o644); err != nil {
			t.Fatal(err)
		}
		m, err := s.Pull(t.Context(), Sources{}, url, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		holds(t, m, files)
	}
}

// A file that a failed pull has checked is of the manifest of then. When the publisher
// corrects it, at the same size, the right one is fetched; and nothing stays of files that
// the new manifest does not name.
func TestPullOverACorrectedManifest(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	staging := s.staging(Ref{"m", "v1"})
	if err := os.MkdirAll(staging, 0o755); err != nil {
		t.Fatal(err)
	}
	old := map[string][]byte{"a": randomBytes(1, 1000), "kept": randomBytes(3, 700), "dropped": randomBytes(4, 300)}
	for name, b := range old {
		if err := os.WriteFile(filepath.Join(staging, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string][]byte{"a": randomBytes(9, 1000), "b": randomBytes(2, 500), "kept": old["kept"]}
	url := o.publish(t, "m", "v1", files)
	m, err := s.Pull(t.Context(), Sources{}, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	if _, err := s.Verify(t.Context(), Ref{"m", "v1"}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(m.Dir, "dropped")); !os.IsNotExist(err) {
		t.Errorf("a file of the old manifest is in the version: %v", err)
	}
	if asked := o.asked(); strings.Contains(asked, "kept") {
		t.Errorf("fetched again: %s", asked)
	}
}

// A file that is not the manifest's is named with both hashes, and nothing of it
// stays.
func TestPullOfWrongBytes(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"model.gguf": randomBytes(6, 10_000), "fine": []byte("fine")}
	url := o.publish(t, "m", "v1", files)
	flipped := bytes.Clone(files["model.gguf"])
	flipped[5000] ^= 1
	o.set(func() { o.files["/m/v1/model.gguf"] = flipped })
	_, err := s.Pull(t.Context(), Sources{}, url, nil)
	he, ok := errors.AsType[*HashError](err)
	want, got := sha256.Sum256(files["model.gguf"]), sha256.Sum256(flipped)
	if !ok || he.Path != "model.gguf" || he.Want != hex.EncodeToString(want[:]) || he.Got != hex.EncodeToString(got[:]) {
		t.Fatalf("%v", err)
	}
	if msg := err.Error(); !strings.Contains(msg, "pull m@v1: model.gguf: sha256 is "+he.Got+", the manifest says "+he.Want) {
		t.Errorf("%s", msg)
	}
	if _, err := os.Stat(filepath.Join(s.staging(Ref{"m", "v1"}), "model.gguf"+partSuffix)); !os.IsNotExist(err) {
		t.Errorf("the wrong bytes are kept: %v", err)
	}
	o.set(func() { o.files["/m/v1/model.gguf"] = files["model.gguf"] })
	if m, err := s.Pull(t.Context(), Sources{}, url, nil); err != nil {
		t.Error(err)
	} else {
		holds(t, m, files)
	}
}

func TestPullFails(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"x": randomBytes(7, 1000)}
	url := o.publish(t, "m", "v1", files)
	long := append(bytes.Clone(files["x"]), 'x')
	for name, c := range map[string]struct {
		location string
		break_   func()
		want     string
	}{
		"no manifest":    {o.URL + "/none", func() {}, "404"},
		"no file":        {url, func() { delete(o.files, "/m/v1/x") }, "404"},
		"too long":       {url, func() { o.files["/m/v1/x"] = long }, "longer than the manifest says: 1000 bytes"},
		"no path":        {"/nowhere/m.json", func() {}, "no such file"},
		"unknown scheme": {"ftp://h/m.json", func() {}, "want a file, an http"},
		"bad manifest":   {o.URL + "/m/v1/x", func() { o.files["/m/v1/x"] = []byte("name: [") }, "manifest"},
		"secret":         {strings.Replace(o.URL, "http://", "http://user:hunter2@", 1) + "/none?token=hunter2", func() {}, "404"},
	} {
		o.set(func() {
			o.files["/m/v1/x"] = files["x"]
			c.break_()
		})
		_, err := s.Pull(t.Context(), Sources{}, c.location, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A passing error is tried over.
	o.set(func() { o.files["/m/v1/x"], o.status = files["x"], http.StatusServiceUnavailable })
	if _, err := s.Pull(t.Context(), Sources{}, url, nil); err != nil {
		t.Error(err)
	}
	// A version never changes.
	other := o.publish(t, "m", "v1", map[string][]byte{"x": []byte("other")})
	if _, err := s.Pull(t.Context(), Sources{}, other, nil); err == nil || !strings.Contains(err.Error(), "never changes") {
		t.Error(err)
	}
}

// Two processes that pull the same version fetch it once.
func TestPullsAtTheSameTime(t *testing.T) {
	o, dir := newOrigin(t), t.TempDir()
	files := map[string][]byte{"x": randomBytes(8, 200_000)}
	url := o.publish(t, "m", "v1", files)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := Open(dir).Pull(t.Context(), Sources{}, url, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := strings.Count(o.asked(), "/m/v1/x"); n != 1 {
		t.Errorf("fetched %d times", n)
	}
	s := Open(dir)
	unlock, err := s.lock(t.Context(), Ref{"m", "v1"})
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := s.lock(ctx, Ref{"m", "v1"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a held lock: %v", err)
	}
}

// A cancelled pull leaves what it has, and ends at once.
func TestPullIsCancelled(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"x": randomBytes(8, 3_000_000)}
	url := o.publish(t, "m", "v1", files)
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := s.Pull(ctx, Sources{}, url, func(done, _ int64) {
		if done > 100_000 {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := s.Find(Ref{"m", "v1"}); !errors.Is(err, ErrMissing) {
		t.Error(err)
	}
	m, err := s.Pull(t.Context(), Sources{}, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	if !strings.Contains(o.asked(), "bytes=") {
		t.Error("it began anew")
	}
}

func TestPullFromAFolder(t *testing.T) {
	dir, s := t.TempDir(), Open(t.TempDir())
	files := map[string][]byte{"a b.gguf": randomBytes(1, 5000), "sub/c": []byte("c")}
	for path, b := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := json.Marshal(describe("m", "v1", files))
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "m.json")
	if err := os.WriteFile(at, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	for i, location := range []string{at, "file://" + at} {
		m, err := Open(filepath.Join(s.dir, strconv.Itoa(i))).Pull(t.Context(), Sources{}, location, nil)
		if err != nil {
			t.Fatal(err)
		}
		holds(t, m, files)
	}
}

// What happens to a model on disk is found: by its size at once, by its hash when
// asked.
func TestVerify(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"x": randomBytes(1, 5000), "y": randomBytes(2, 5000)}
	m, err := s.Pull(t.Context(), Sources{}, o.publish(t, "m", "v1", files), nil)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(files["y"])
	flipped[0] ^= 1
	if err := os.WriteFile(filepath.Join(m.Dir, "y"), flipped, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Find(Ref{"m", "v1"}); err != nil {
		t.Errorf("the size is right: %v", err)
	}
	if _, err := s.Verify(t.Context(), Ref{"m", "v1"}); err == nil || !strings.Contains(err.Error(), "y: sha256 is") || strings.Contains(err.Error(), "x:") {
		t.Errorf("%v", err)
	}
	if err := os.Truncate(filepath.Join(m.Dir, "y"), 10); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Find(Ref{"m", "v1"}); !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "y is missing or has another size") {
		t.Errorf("%v", err)
	}
	if list, err := s.List(); err != nil || list[0].State != StateBroken || !strings.Contains(list[0].Reason, "y is missing") {
		t.Errorf("%+v, %v", list, err)
	}
	// A pull mends it.
	if m, err = s.Pull(t.Context(), Sources{}, o.URL+"/m/v1/manifest.json", nil); err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
}
