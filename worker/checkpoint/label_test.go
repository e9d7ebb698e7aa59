package checkpoint

import (
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
)

// TestLabels: whoever looks at a store reads whose KV it is, also after it was dropped
// while the worker went on, and what is dropped is not restored.
func TestLabels(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	r := newRig(t, dir, "gemma", Config{Block: 16}, nil)
	look, err := dirstore.Open(dirstore.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer look.Close()
	ids := r.prompt(40)
	for range 2 {
		if _, first := r.generate(ids, r.with(params(40), stream(1)), 40); first.Restored != 0 {
			t.Errorf("%d tokens are restored of what was dropped", first.Restored)
		}
		r.flush()
		models, err := look.Models(t.Context())
		want := kvcache.Label{Model: "gemma", Text: r.e.Model().Fingerprint}
		if err != nil || len(models) != 1 || models[0].Label != want || models[0].Blocks < 3 {
			t.Fatalf("%+v, %v; want %+v", models, err, want)
		}
		if err := look.Drop(t.Context(), models[0].Fingerprint); err != nil {
			t.Fatal(err)
		}
	}
}
