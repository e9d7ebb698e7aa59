package redistier

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// readHex reads a file of hexadecimal lines. testdata/manifest-v1.hex was written by
// another program, from the description in the package comment, for the golden frame of
// package kvcache: it is the format, so there is no flag to rewrite it.
func readHex(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenManifest(t *testing.T) {
	want, frame := readHex(t, "testdata/manifest-v1.hex"), readHex(t, "../testdata/frame-v1.hex")
	h, err := kvcache.DecodeHeader(frame)
	if err != nil {
		t.Fatal(err)
	}
	m := manifest{part: 100, header: h}
	for i := range m.nonce {
		m.nonce[i] = byte(i)
	}
	if got := m.encode(frame[:h.Len]); !bytes.Equal(got, want) {
		t.Errorf("manifest:\n%swant:\n%s", hex.Dump(got), hex.Dump(want))
	}
	got, err := parseManifest(want, kvcache.Plain)
	if err != nil || got.nonce != m.nonce || got.part != m.part || got.header.Ref != h.Ref {
		t.Errorf("%+v, %v", got, err)
	}
	sum := int64(0)
	for i := range got.parts() {
		sum += got.size(i)
	}
	if sum != h.Total || got.parts() != int(h.Total+99)/100 {
		t.Errorf("%d parts of %d bytes together, want %d", got.parts(), sum, h.Total)
	}
	k := keys{"p"}
	if all := k.all(&got); len(all) != got.parts()+1 || all[1] != "p:b:{"+h.Key.String()+"}:000102030405060708090a0b0c0d0e0f:0" {
		t.Errorf("keys %q", all)
	}
}

// TestDamagedManifest flips every bit of one and cuts it everywhere: none passes.
func TestDamagedManifest(t *testing.T) {
	good := readHex(t, "testdata/manifest-v1.hex")
	refused := func(what string, at int, b []byte) {
		t.Helper()
		_, err := parseManifest(b, kvcache.Plain)
		if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
			t.Errorf("%s at %d: %v", what, at, err)
		}
	}
	for i := range 8 * len(good) {
		b := bytes.Clone(good)
		b[i/8] ^= 1 << (i % 8)
		refused("flip", i, b)
	}
	for n := range good {
		refused("cut", n, good[:n])
	}
	refused("longer", 0, append(bytes.Clone(good), 0))
	// Whole, but of a writer that was wrong.
	for name, change := range map[string]func([]byte){
		"no parts":       func(b []byte) { binary.LittleEndian.PutUint32(b[12:], 0) },
		"parts of none":  func(b []byte) { binary.LittleEndian.PutUint64(b[16:], 0) },
		"negative parts": func(b []byte) { binary.LittleEndian.PutUint64(b[16:], 1<<63) },
		"total":          func(b []byte) { binary.LittleEndian.PutUint64(b[24:], 1<<40) },
	} {
		b := bytes.Clone(good)
		change(b)
		binary.LittleEndian.PutUint32(b[8:], manifestSum(b))
		if _, err := parseManifest(b, kvcache.Plain); err == nil {
			t.Errorf("%s: passes", name)
		}
	}
}

func TestMembers(t *testing.T) {
	space := kvcache.NewSpace("m", nil)
	key := space.Key(space.Root, []int32{1})
	m := member(space.Fingerprint, key)
	if got, err := keyOf(m); err != nil || got != key || len(m) != memberLen || !strings.HasPrefix(m, model(space.Fingerprint)) {
		t.Errorf("member %q: %v, %v", m, got, err)
	}
	if got := sibling(m, space.Root); got != member(space.Fingerprint, space.Root) {
		t.Errorf("sibling %q", got)
	}
	for _, bad := range []string{"", "x", m + "x", strings.Replace(m, m[30:31], "*", 1)} {
		if _, err := keyOf(bad); err == nil {
			t.Errorf("%q is a block", bad)
		}
	}
}

// FuzzManifest feeds manifests, changed and invented: what passes is what its header says
// and names a number of parts that make up the frame.
func FuzzManifest(f *testing.F) {
	good := readHex(f, "testdata/manifest-v1.hex")
	f.Add(good, 0, uint64(0))
	f.Add(good[:100], 16, uint64(1))
	f.Add([]byte{}, 24, uint64(1<<62))
	f.Fuzz(func(t *testing.T, b []byte, at int, value uint64) {
		if at >= 0 && at+8 <= len(b) && value != 0 {
			binary.LittleEndian.PutUint64(b[at:], value)
		}
		if len(b) >= 12 {
			binary.LittleEndian.PutUint32(b[8:], manifestSum(b)) // past the checksum
		}
		m, err := parseManifest(b, kvcache.Plain)
		if err != nil {
			if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
				t.Fatalf("%v is no refusal", err)
			}
			return
		}
		n := m.parts()
		if n < 1 || n > maxParts || m.size(n-1) < 1 || m.size(n-1)+int64(n-1)*m.part != m.header.Total {
			t.Fatalf("%d parts of %d for %d bytes", n, m.part, m.header.Total)
		}
		if !bytes.Equal(m.encode(b[manifestFixed:]), b) && b[6] == 0 && b[7] == 0 {
			t.Fatal("it is written otherwise")
		}
	})
}
