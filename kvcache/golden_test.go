package kvcache

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// readGolden reads a file of hexadecimal lines. The golden files were written by
// another program, from the description in the package comment: they are the
// format, so there is no flag to rewrite them.
func readGolden(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// goldenFrame is what testdata/frame-v1.hex holds.
func goldenFrame() (Meta, []Part, []byte) {
	space := NewSpace("gemma/f16", []byte("tenant"))
	count := make([]byte, 60)
	for i := range count {
		count[i] = byte(i)
	}
	return Meta{Space: space, Parent: space.Root, First: 64, IDs: []int32{1, 2, -3}},
		[]Part{
			{Plane: PlaneMeta, Size: 4},
			{Group: 1, Layers: 12, Plane: PlaneKeys, Size: 40},
			{Group: 2, Layer: 12, Layers: 6, Kind: Windowed, Plane: PlaneValues, Window: 512},
			{Group: 3, Layers: 18, Kind: Snapshot, Size: 20},
		}, append([]byte("meta"), count...)
}

func TestGoldenFrame(t *testing.T) {
	want := readGolden(t, "frame-v1.hex")
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(f.Bytes(), want) {
		t.Errorf("frame:\n%swant:\n%s", hex.Dump(f.Bytes()), hex.Dump(want))
	}
	g, err := Decode(want, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(f.Header, g.Header); diff != "" {
		t.Error(diff)
	}
	if b, err := g.Payload(); err != nil || !bytes.Equal(b, payload) {
		t.Errorf("payload %q, %v", b, err)
	}
}

// TestGoldenKeys holds hashes that another program computed.
func TestGoldenKeys(t *testing.T) {
	space := NewSpace("gemma/f16", nil)
	first := space.Key(space.Root, []int32{1, 2, -3})
	for name, c := range map[string]struct{ got, want string }{
		"fingerprint": {space.Fingerprint.String(), "6f74ab7a8555b747554cd02be1d042156be1051091a91900236449c911c3d0b2"},
		"root":        {Root("gemma/f16", nil).String(), "5dd9615bb9ce7cccc7d4809909fde84d51a01acca290becb1bf908ec01fff242"},
		"salted":      {Root("gemma/f16", []byte("tenant")).String(), "4f6a516b837b4e4a2d29d79aa937ef1c969ade0af3ea6896e658bf1db5259c51"},
		"first":       {first.String(), "1e8b79fc7316ef5f221fa4e9a2d1b9678e0fa5a47aca8b7b5e64599cdd7e3ff4"},
		"second":      {space.Key(first, []int32{4}).String(), "05065a17e4327821b070501752c039957eb45a2874bc8c188f931fe2936249cb"},
	} {
		if c.got != c.want {
			t.Errorf("%s: %s, want %s", name, c.got, c.want)
		}
	}
	if space.Root != Root("gemma/f16", nil) {
		t.Error("NewSpace and Root differ")
	}
}
