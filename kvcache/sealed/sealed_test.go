//go:build unix

package sealed_test

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/sealed"
	"github.com/kvmesh/kvmesh/kvcache/sealed/sealedtest"
)

// key is 32 bytes in base64 that begin with a letter.
func key(letter byte) string {
	b := bytes.Repeat([]byte{letter}, 32)
	b[31] = 0
	return base64.StdEncoding.EncodeToString(b)
}

// open opens an encrypted disk until the test ends.
func open(t *testing.T, dir, keys string, registry prometheus.Registerer) *sealed.Store {
	t.Helper()
	k, err := sealed.ParseKeys([]byte(keys))
	if err != nil {
		t.Fatal(err)
	}
	under, err := nvmetier.Open(nvmetier.Config{Dir: dir, Form: kvcache.Encrypted})
	if err != nil {
		t.Fatal(err)
	}
	s, err := sealed.New(sealed.Config{Store: under, Keys: k, Tier: "nvme", Registry: registry})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// chain puts blocks of 4 tokens each behind a parent.
func chain(t *testing.T, s kvcache.Store, space kvcache.Space, parent kvcache.Key, first int, ids []int32) (refs []kvcache.Ref) {
	t.Helper()
	for ; len(ids) > 0; first, ids = first+4, ids[4:] {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: first, IDs: ids[:4]}, []kvcache.Part{{Size: 11}}, []byte("the payload"))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		refs, parent = append(refs, f.Ref), f.Key
	}
	return refs
}

// found is how many tokens a look-up finds, and whether all its blocks can be read.
func found(t *testing.T, s kvcache.Store, space kvcache.Space, ids []int32) int {
	t.Helper()
	m, err := s.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range m.Blocks {
		l, err := s.Get(t.Context(), b.Ref)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := l.Payload(); err != nil || string(p) != "the payload" || l.Total != b.Size {
			t.Errorf("%q of %d bytes, want %d: %v", p, l.Total, b.Size, err)
		}
		l.Release()
	}
	return m.Tokens() + m.Common
}

// TestRotation: what was written with older keys is found, also where a chain goes on with
// a newer one; without a key it is not there, and nothing else is harmed.
func TestRotation(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	acme, other := kvcache.NewSpace("m", []byte("acme")), kvcache.NewSpace("m", nil)
	ids := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	list := func(ids ...byte) string {
		var keys []string
		for _, id := range ids {
			keys = append(keys, `{"id": "`+string(id)+`", "key": "`+key(id)+`"}`)
		}
		return "[" + strings.Join(keys, ",") + "]"
	}
	file := func(acme, others string) string {
		return `{"default": ` + others + `, "tenants": {"acme": ` + acme + `}}`
	}

	s := open(t, dir, file(list('a'), list('d')), nil)
	refs := chain(t, s, acme, acme.Root, 0, ids[:8])
	chain(t, s, other, other.Root, 0, ids)
	s.Close()

	s = open(t, dir, file(list('b', 'a'), list('d')), nil)
	chain(t, s, acme, refs[1].Key, 8, ids[8:])
	if n := found(t, s, acme, ids); n != 12 {
		t.Errorf("%d tokens over two keys, want 12", n)
	}
	if n := found(t, s, acme, ids[:6]); n != 6 {
		t.Errorf("%d tokens of a partial block of an older key, want 6", n)
	}
	s.Close()

	for _, c := range []struct {
		name, keys  string
		acme, other int
		counted     float64
	}{
		{"the first key is gone", file(list('b'), list('d')), 0, 12, 0},
		{"no key of the tenant", file(list(), list('d')), 0, 12, 1},
		{"another key", file(list('x'), list('d')), 0, 12, 0},
		{"no default", file(list('a'), list()), 8, 0, 1},
		{"all", file(list('a', 'b'), list('d')), 12, 12, 0},
	} {
		registry := prometheus.NewPedanticRegistry()
		s := open(t, dir, c.keys, registry)
		if n := found(t, s, acme, ids); n != c.acme {
			t.Errorf("%s: %d tokens, want %d", c.name, n, c.acme)
		}
		if n := found(t, s, other, ids); n != c.other {
			t.Errorf("%s: %d tokens of others, want %d", c.name, n, c.other)
		}
		want := "# HELP kvmesh_kv_sealed_no_key_total Calls for tenants without a key, which are misses.\n# TYPE kvmesh_kv_sealed_no_key_total counter\n" +
			`kvmesh_kv_sealed_no_key_total{tier="nvme"} ` + string('0'+byte(c.counted)) + "\n"
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		s.Close()
	}
}

// TestNoKey: a tenant without a key has nothing kept, and nothing is found.
func TestNoKey(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "kv"), sealedtest.Text, nil)
	space := kvcache.NewSpace("m", []byte("gone"))
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1}}, []kvcache.Part{{Size: 1}}, []byte{1})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), f); !errors.Is(err, kvcache.ErrNoKey) {
		t.Errorf("put: %v", err)
	}
	if _, err := s.Get(t.Context(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
	if st := s.Stats(); st.Misses != 1 || st.Puts != 0 {
		t.Errorf("counted %+v", st)
	}
}

// TestShowsNothing: neither names nor files have tokens, keys, the payload or the tenant.
func TestShowsNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := open(t, dir, sealedtest.Text, nil)
	space := kvcache.NewSpace("m", []byte("t"))
	ids := []int32{0x5eed1, 0x5eed2, 0x5eed3, 0x5eed4, 0x5eed5, 0x5eed6, 0x5eed7, 0x5eed8}
	refs := chain(t, s, space, space.Root, 0, ids)
	s.Close()
	secrets := [][]byte{[]byte("the payload"), space.Root[:], refs[0].Key[:], refs[1].Key[:]}
	for _, id := range ids {
		secrets = append(secrets, binary.LittleEndian.AppendUint32(nil, uint32(id)), binary.BigEndian.AppendUint32(nil, uint32(id)))
	}
	files := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		b, err := os.ReadFile(path)
		shown := slices.Concat([]byte(path), b)
		for _, field := range strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '.' }) {
			if name, err := base64.RawURLEncoding.DecodeString(field); err == nil {
				shown = append(shown, name...)
			}
			if name, err := hex.DecodeString(field); err == nil {
				shown = append(shown, name...)
			}
		}
		for _, secret := range secrets {
			if bytes.Contains(shown, secret) {
				t.Errorf("%s shows %x", path, secret)
			}
		}
		return err
	})
	if err != nil || files != 3 { // with the lock
		t.Errorf("%d files, %v", files, err)
	}
}

// TestRemoved: a block that a foreign key has encrypted is refused, counted and removed.
func TestRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	space := kvcache.NewSpace("m", nil)
	s := open(t, dir, sealedtest.Text, nil)
	refs := chain(t, s, space, space.Root, 0, []int32{1, 2, 3, 4})
	s.Close()
	// Its ciphertext is exchanged, with right checksums: only who has the key can tell.
	files, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*", "*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	h, err := kvcache.Encrypted.DecodeHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if _, err := kvcache.SealEncrypted(b, kvcache.Meta{Space: h.Space, Parent: h.Parent, First: h.First, IDs: h.IDs}, h.Key, h.Parts); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, sealedtest.Text, nil)
	_, err = s.Get(t.Context(), refs[0])
	if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
		t.Errorf("%v is no refusal", err)
	}
	if _, err = s.Get(t.Context(), refs[0]); !errors.Is(err, kvcache.ErrNotFound) {
		t.Errorf("it is still there: %v", err)
	}
	if n := s.Stats().Refused[kvcache.ReasonChecksum]; n != 1 {
		t.Errorf("%d refusals, want 1", n)
	}
}

func TestLoadKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.json")
	write := func(text string, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	write(sealedtest.Text, 0o600)
	if _, err := sealed.LoadKeys(path); err != nil {
		t.Error(err)
	}
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o602} {
		write(sealedtest.Text, mode)
		if _, err := sealed.LoadKeys(path); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	if _, err := sealed.LoadKeys(filepath.Dir(path)); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("a folder: %v", err)
	}
	if _, err := sealed.LoadKeys(path + "x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	good := `{"id": "a", "key": "` + key('a') + `"}`
	for name, text := range map[string]string{
		"empty": "", "nothing": "{}", "no key": `{"default": [], "tenants": {"t": []}}`, "unknown": `{"defaults": [` + good + `]}`,
		"twice": `{"default": [` + good + `, ` + good + `]}`, "more": `{"default": [` + good + `]} {}`,
		"short": `{"default": [{"id": "a", "key": "aGVsbG8="}]}`, "no id": `{"default": [{"key": "` + key('a') + `"}]}`,
		"long id": `{"default": [{"id": "12345678901234567", "key": "` + key('a') + `"}]}`,
		"zeros":   `{"default": [{"id": "a", "key": "` + base64.StdEncoding.EncodeToString(make([]byte, 32)) + `"}]}`,
	} {
		write(text, 0o600)
		if _, err := sealed.LoadKeys(path); err == nil || strings.Contains(err.Error(), key('a')) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
