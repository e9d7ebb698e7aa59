package sealed

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Keys are the keys of tenants. They are safe for concurrent use.
type Keys struct {
	others  []*secret // of tenants that are not named
	tenants map[string][]*secret

	mu sync.Mutex
	// roots are those of the named tenants, by fingerprint.
	roots map[kvcache.Fingerprint]map[kvcache.Key][]*secret
}

// keyFile is the form of a file of keys.
type keyFile struct {
	Default []keyEntry            `json:"default"`
	Tenants map[string][]keyEntry `json:"tenants"`
}

// keyEntry is one key.
type keyEntry struct {
	ID  string `json:"id"`
	Key string `json:"key"`
}

// The limits of a file of keys.
const (
	mostFile    = 16 << 20
	mostID      = 16
	mostPrints  = 256 // fingerprints whose roots are remembered
	keyFileMode = 0o077
)

// LoadKeys reads a file of keys, as ParseKeys has it. It must be a regular file that
// nobody but its owner can read or write. No error has anything of a key.
func LoadKeys(path string) (*Keys, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("keys of tenants: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("keys of tenants: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("keys of tenants: %s: %w: no regular file", path, fs.ErrInvalid)
	}
	if info.Mode()&keyFileMode != 0 {
		return nil, fmt.Errorf("keys of tenants: %s: %w: mode %#o, others can read or write it; 0600 is wanted", path, fs.ErrPermission, info.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, mostFile+1))
	if err != nil {
		return nil, fmt.Errorf("keys of tenants: %w", err)
	}
	k, err := ParseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("keys of tenants: %s: %w", path, err)
	}
	return k, nil
}

// ParseKeys reads keys as JSON:
//
//	{"default": [{"id": "2026-11", "key": "BASE64 OF 32 BYTES"}],
//	 "tenants": {"acme": [{"id": "b", "key": "…"}, {"id": "a", "key": "…"}], "gone": []}}
//
// The first key of a list encrypts, and all of them decrypt. Tenants are named by their
// salt, the cache_salt of their requests. One that is named without a key has none: what
// was encrypted for it is lost, and nothing of it is kept. Others have the default keys; if
// there are none, nothing of theirs is kept.
func ParseKeys(text []byte) (*Keys, error) {
	if len(text) > mostFile {
		return nil, fmt.Errorf("more than %d bytes", mostFile)
	}
	var file keyFile
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	// A decoder's errors may repeat what it read.
	if err := d.Decode(&file); err != nil {
		return nil, fmt.Errorf("no JSON of the form {\"default\": [{\"id\": …, \"key\": …}], \"tenants\": {…}}, near byte %d", d.InputOffset())
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the keys")
	}
	k := &Keys{tenants: map[string][]*secret{}, roots: map[kvcache.Fingerprint]map[kvcache.Key][]*secret{}}
	var err error
	if k.others, err = secrets("default", file.Default); err != nil {
		return nil, err
	}
	n := len(k.others)
	for name, list := range file.Tenants {
		if k.tenants[name], err = secrets(fmt.Sprintf("tenant %q", name), list); err != nil {
			return nil, err
		}
		n += len(list)
	}
	if n == 0 {
		return nil, errors.New("no key at all")
	}
	return k, nil
}

// secrets reads a list of keys.
func secrets(whose string, list []keyEntry) (out []*secret, err error) {
	seen := map[string]bool{}
	for i, e := range list {
		if e.ID == "" || len(e.ID) > mostID || seen[e.ID] {
			return nil, fmt.Errorf("%s: key %d: want an id of 1 to %d bytes that no other of the list has", whose, i+1, mostID)
		}
		seen[e.ID] = true
		b, err := base64.StdEncoding.DecodeString(e.Key)
		if err != nil || len(b) != 32 || bytes.Count(b, b[:1]) == len(b) {
			return nil, fmt.Errorf("%s: key %q: want 32 random bytes in base64, such as `head -c 32 /dev/urandom | base64`", whose, e.ID)
		}
		s, err := newSecret(e.ID, [32]byte(b))
		if err != nil {
			return nil, fmt.Errorf("%s: key %q: %w", whose, e.ID, err)
		}
		out = append(out, s)
	}
	return out, nil
}

// of returns the keys of a space, the first of which encrypts.
func (k *Keys) of(s kvcache.Space) []*secret {
	k.mu.Lock()
	defer k.mu.Unlock()
	roots := k.roots[s.Fingerprint]
	if roots == nil {
		if len(k.roots) >= mostPrints {
			clear(k.roots)
		}
		roots = map[kvcache.Key][]*secret{}
		for name, list := range k.tenants {
			for _, root := range s.Fingerprint.TenantRoots(name) {
				roots[root] = list
			}
		}
		k.roots[s.Fingerprint] = roots
	}
	if list, ok := roots[s.Root]; ok {
		return list
	}
	return k.others
}

// Ref returns the name under which a block is written, false where its tenant has no key.
func (k *Keys) Ref(ref kvcache.Ref) (kvcache.Ref, bool) {
	list := k.of(ref.Space)
	if len(list) == 0 {
		return kvcache.Ref{}, false
	}
	return list[0].ref(ref), true
}
