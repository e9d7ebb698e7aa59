package sealed

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

// testSecret makes a key whose bytes count up from one.
func testSecret(t testing.TB, id string, from byte) *secret {
	t.Helper()
	var key [32]byte
	for i := range key {
		key[i] = from + byte(i)
	}
	s, err := newSecret(id, key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// plainFrame is a block of a tenant.
func plainFrame(t testing.TB, tenant string, ids []int32, payload []byte) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace("gemma/f16", []byte(tenant))
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, First: 64, IDs: ids},
		[]kvcache.Part{{Plane: kvcache.PlaneKeys, Size: int64(len(payload))}}, payload)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// reopen decodes what a store would have, and opens it.
func reopen(s *secret, b []byte, want kvcache.Ref) (*kvcache.Frame, error) {
	f, err := kvcache.Encrypted.Decode(b, s.ref(want))
	if err != nil {
		return nil, err
	}
	return s.open(f, &want)
}

var goldenSalt = [32]byte{1, 2, 3, 31: 4} // of the golden file

// TestGolden: the frame of testdata is what this package writes and reads.
func TestGolden(t *testing.T) {
	text, err := os.ReadFile("testdata/frame-v2.hex")
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	s, f := testSecret(t, "2026-11", 0), plainFrame(t, "tenant", []int32{1, 2, -3}, []byte("payload"))
	e, err := s.seal(f, goldenSalt)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(e.Bytes(), want) {
		t.Errorf("frame:\n%swant:\n%s", hex.Dump(e.Bytes()), hex.Dump(want))
	}
	g, err := reopen(s, want, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(f.Header, g.Header); diff != "" || !bytes.Equal(f.Bytes(), g.Bytes()) {
		t.Error(diff)
	}
}

// TestPieces: frames about the length of a piece, and what is computed of lengths.
func TestPieces(t *testing.T) {
	s := testSecret(t, "k", 1)
	for _, size := range []int{0, 1, unit - 4000, unit - 257, unit - 256, unit - 255, 2*unit - 256, 3 * unit} {
		f := plainFrame(t, "t", []int32{5, 6}, bytes.Repeat([]byte{7}, size))
		e, err := s.seal(f, goldenSalt)
		if err != nil {
			t.Fatal(err)
		}
		g, err := reopen(s, e.Bytes(), f.Ref)
		if err != nil || !bytes.Equal(f.Bytes(), g.Bytes()) {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if n, ok := plainSize(e.Total, 2); !ok || n != f.Total {
			t.Errorf("%d bytes: %d, %v, want %d", size, n, ok, f.Total)
		}
	}
	for _, total := range []int64{1, unit, unit + 1, 4095 * unit, 4095*unit + 1, 1 << 39} {
		if n := pieces(total); n < 1 || n > kvcache.MaxParts-1 {
			t.Errorf("%d bytes in %d pieces", total, n)
		}
		if n, ok := plainSize(sizeOf(total, 64), 64); !ok || n != total && total < 4095*unit {
			t.Errorf("%d bytes: %d, %v", total, n, ok)
		}
	}
}

// TestDamage: any flipped bit and any length is refused, also where checksums are right.
func TestDamage(t *testing.T) {
	s, f := testSecret(t, "k", 1), plainFrame(t, "t", []int32{1, 2, 3}, []byte("some bytes of state"))
	e, err := s.seal(f, goldenSalt)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, b []byte) {
		t.Helper()
		_, err := reopen(s, b, f.Ref)
		if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
			t.Errorf("%s: %v", what, err)
		}
	}
	for i := range 8 * len(e.Bytes()) {
		b := bytes.Clone(e.Bytes())
		b[i/8] ^= 1 << (i % 8)
		refused("a flipped bit", b)
		if h := int(e.Len); i/8 >= h {
			refused("a flipped bit with the right checksum", resum(t, e, b[h:]))
		}
	}
	for n := range e.Bytes() {
		refused("cut", e.Bytes()[:n])
	}
	refused("longer", append(bytes.Clone(e.Bytes()), 0))
	// What is shown of tokens and place is bound to the content.
	for _, change := range []func(*kvcache.Meta){
		func(m *kvcache.Meta) { m.First++ }, func(m *kvcache.Meta) { m.IDs = []int32{1, 2, 3} },
		func(m *kvcache.Meta) { m.IDs = append(m.IDs, 1) },
	} {
		m := kvcache.Meta{Space: e.Space, Parent: e.Parent, First: e.First, IDs: slices.Clone(e.IDs)}
		change(&m)
		refused("another header", rewrite(t, m, e, e.Bytes()[e.Len:]))
	}
}

// resum makes a frame with the header of e, another payload, and right checksums.
func resum(t *testing.T, e *kvcache.Frame, payload []byte) []byte {
	t.Helper()
	return rewrite(t, kvcache.Meta{Space: e.Space, Parent: e.Parent, First: e.First, IDs: e.IDs}, e, payload)
}

// rewrite makes a frame of a header's choice with the key and the parts of e.
func rewrite(t *testing.T, m kvcache.Meta, e *kvcache.Frame, payload []byte) []byte {
	t.Helper()
	parts := slices.Clone(e.Parts)
	buf := append(make([]byte, kvcache.HeaderLen(len(m.IDs), len(parts))), payload...)
	f, err := kvcache.SealEncrypted(buf, m, e.Key, parts)
	if err != nil {
		t.Fatal(err)
	}
	return f.Bytes()
}

// TestSwapped: pieces and frames of others are refused, whatever is in their headers.
func TestSwapped(t *testing.T) {
	s, other := testSecret(t, "k", 1), testSecret(t, "k", 2)
	payload := bytes.Repeat([]byte{1}, 3*unit)
	f, g := plainFrame(t, "t", []int32{1}, payload), plainFrame(t, "t", []int32{2}, payload)
	tenant := plainFrame(t, "u", []int32{1}, payload)
	e, err := s.seal(f, goldenSalt)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, payload []byte) {
		t.Helper()
		if _, err := reopen(s, resum(t, e, payload), f.Ref); err == nil {
			t.Errorf("%s: opened", what)
		}
	}
	moved := bytes.Clone(e.Bytes()[e.Len:])
	one, two := moved[metaLen:][:unit+tagLen], moved[metaLen+unit+tagLen:][:unit+tagLen]
	first := bytes.Clone(one)
	copy(one, two)
	copy(two, first)
	refused("two pieces in another order", moved)
	for what, by := range map[string]struct {
		s *secret
		f *kvcache.Frame
	}{"another block": {s, g}, "another tenant's": {s, tenant}, "another key's": {other, f}} {
		x, err := by.s.seal(by.f, goldenSalt)
		if err != nil {
			t.Fatal(err)
		}
		refused(what, x.Bytes()[x.Len:])
		if _, err := reopen(s, x.Bytes(), f.Ref); err == nil {
			t.Errorf("%s: opened", what)
		}
	}
	// A plain frame in the place of an encrypted one, and the other way round.
	if _, err := kvcache.Encrypted.Decode(f.Bytes(), f.Ref); err == nil {
		t.Error("a plain frame was taken for an encrypted one")
	}
	if _, err := kvcache.Decode(e.Bytes(), e.Ref); err == nil {
		t.Error("an encrypted frame was taken for a plain one")
	}
}

// TestTokens: equal beginnings behind one parent look equal, and nothing else does.
func TestTokens(t *testing.T) {
	s, other := testSecret(t, "k", 1), testSecret(t, "k", 2)
	a := s.tokens(kvcache.Key{1}, []int32{7, 7, 7, 8, 9})
	b := s.tokens(kvcache.Key{1}, []int32{7, 7, 7, 5, 9})
	for i := range a {
		if (a[i] == b[i]) != (i < 3) {
			t.Errorf("token %d: %x and %x", i, a[i], b[i])
		}
	}
	if a[0] == a[1] || a[1] == a[2] {
		t.Error("one token looks the same at two places")
	}
	for what, c := range map[string][]int32{
		"another parent": s.tokens(kvcache.Key{2}, []int32{7, 7}), "another key": other.tokens(kvcache.Key{1}, []int32{7, 7}),
		"the other half": s.tokens(kvcache.Key{16: 1}, []int32{7, 7}),
	} {
		if c[0] == a[0] || c[1] == a[1] {
			t.Errorf("%s: the same", what)
		}
	}
}

// FuzzOpen: whatever a store hands out, nothing but what was written is opened.
func FuzzOpen(f *testing.F) {
	s, plain := testSecret(f, "k", 1), plainFrame(f, "t", []int32{1, 2, 3}, []byte("some bytes"))
	e, err := s.seal(plain, goldenSalt)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(e.Bytes(), []byte(nil))
	f.Add(e.Bytes()[:e.Len], e.Bytes()[e.Len:])
	f.Fuzz(func(t *testing.T, head, tail []byte) {
		b := append(bytes.Clone(head), tail...)
		got, err := reopen(s, b, plain.Ref)
		if err == nil && !bytes.Equal(got.Bytes(), plain.Bytes()) {
			t.Fatal("something else was opened")
		}
		// With checksums that are right.
		h, err := kvcache.Encrypted.DecodeHeader(head)
		if err != nil || h.Total-h.Len != int64(len(tail)) {
			return
		}
		buf := append(make([]byte, h.Len), tail...)
		x, err := kvcache.SealEncrypted(buf, kvcache.Meta{Space: h.Space, Parent: h.Parent, First: h.First, IDs: h.IDs}, h.Key, h.Parts)
		if err != nil {
			return
		}
		if got, err := s.open(x, &plain.Ref); err == nil && !bytes.Equal(got.Bytes(), plain.Bytes()) {
			t.Fatal("something else was opened")
		}
	})
}

// FuzzParseKeys: a file of keys is whole or refused, and no error tells a key.
func FuzzParseKeys(f *testing.F) {
	key := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("hunter2-"), 4))
	f.Add([]byte(`{"default":[{"id":"a","key":"` + key + `"}],"tenants":{"t":[]}}`))
	f.Add([]byte(`{"default":[{"id":"a","key":"` + key + `"}]} x`))
	f.Add([]byte(`{"default":[{"id":"a","key":"` + key[1:] + `"}], "x": 1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := ParseKeys(b)
		if err != nil && strings.Contains(err.Error(), key[4:20]) {
			t.Fatalf("%v", err)
		}
		if err == nil && len(k.others) == 0 && len(k.tenants) == 0 {
			t.Fatal("no key was taken for one")
		}
	})
}
