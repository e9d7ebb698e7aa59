package nvmetier

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

func TestNames(t *testing.T) {
	long := slices.Repeat([]int32{-1, 1 << 30}, 40)
	for _, ids := range [][]int32{{0}, {1, -2, 3}, long[:16], long[:17], long} {
		h := kvcache.Header{Ref: kvcache.NewSpace("m", nil).Child(kvcache.Key{1}, ids), First: 1 << 40, IDs: ids, Total: kvcache.MaxSize}
		b := blockOf(&h, 1<<40)
		name := b.name()
		if len(name) > 255 || strings.Contains(name, "/") {
			t.Errorf("%s: %d characters", name, len(name))
		}
		got, ok := parseName(name)
		if !ok || got != b {
			t.Errorf("%v: %s", cmp.Diff(b, got, cmp.AllowUnexported(block{})), name)
		}
		for _, bad := range []string{"", name[1:], name + "A", "0" + name, "+" + name, strings.ToLower(name), name + ".x"} {
			if got, ok := parseName(bad); ok && got.name() != bad {
				t.Errorf("%q is taken for a name", bad)
			}
		}
	}
}

func FuzzName(f *testing.F) {
	h := kvcache.Header{Ref: kvcache.NewSpace("m", nil).Child(kvcache.Key{1}, []int32{1, 2}), IDs: []int32{1, 2}, Total: 1000}
	b := blockOf(&h, 5)
	f.Add(b.name())
	f.Add("1.0.1.1.AAAAAA." + strings.Repeat("A", 43) + "." + strings.Repeat("A", 43))
	f.Fuzz(func(t *testing.T, name string) {
		if b, ok := parseName(name); ok && b.name() != name {
			t.Errorf("%q and %q are one block's", name, b.name())
		}
	})
}
