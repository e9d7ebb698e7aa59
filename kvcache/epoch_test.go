package kvcache

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestEpochs: new weights begin an epoch, those of before do not unless somebody says so, and
// a fingerprint is in one place only.
func TestEpochs(t *testing.T) {
	v1, v1int8, v2 := FingerprintOf("v1"), FingerprintOf("v1 int8"), FingerprintOf("v2")
	e := Epoch{Model: "m"}
	for i, step := range []struct {
		weights string
		f       Fingerprint
		changed bool
		want    Epoch
	}{
		{"sha256:1", v1, true, Epoch{Number: 1, Weights: "sha256:1", Fingerprints: []Fingerprint{v1}}},
		{"sha256:1", v1, false, Epoch{Number: 1, Weights: "sha256:1", Fingerprints: []Fingerprint{v1}}},
		{"sha256:1", v1int8, true, Epoch{Number: 1, Weights: "sha256:1", Fingerprints: []Fingerprint{v1, v1int8}}},
		{"sha256:2", v2, true, Epoch{Number: 2, Weights: "sha256:2", Past: []string{"sha256:1"}, Fingerprints: []Fingerprint{v2}, Old: []OldVersion{{v1, "sha256:1", false}, {v1int8, "sha256:1", false}}}},
		{"sha256:1", v1, false, Epoch{Number: 2, Weights: "sha256:2", Past: []string{"sha256:1"}, Fingerprints: []Fingerprint{v2}, Old: []OldVersion{{v1, "sha256:1", false}, {v1int8, "sha256:1", false}}}},
	} {
		var changed bool
		e, changed = e.Announced(step.weights, step.f)
		step.want.Model = "m"
		if d := cmp.Diff(step.want, e); d != "" || changed != step.changed {
			t.Fatalf("step %d, changed %v:\n%s", i, changed, d)
		}
	}
	e = e.WithReclaimed(v1)
	again, changed := e.Announced("sha256:1", v1) // an old worker goes on
	if !changed || again.Old[1] != (OldVersion{v1, "sha256:1", false}) || again.Number != 2 {
		t.Errorf("%v %+v", changed, again)
	}
	back := again.Next("sha256:1", Fingerprint{})
	want := Epoch{Model: "m", Number: 3, Weights: "sha256:1", Past: []string{"sha256:2"}, Fingerprints: []Fingerprint{v1int8, v1}, Old: []OldVersion{{v2, "sha256:2", false}}}
	if d := cmp.Diff(want, back); d != "" {
		t.Error(d)
	}
	text, err := json.Marshal(back)
	var read Epoch
	if err := json.Unmarshal(text, &read); err != nil || cmp.Diff(back, read) != "" {
		t.Errorf("%v, %s", err, text)
	}
	if err != nil {
		t.Error(err)
	}
}

// TestEpochsMerge: what a node learnt while it did not know of an earlier record.
func TestEpochsMerge(t *testing.T) {
	v1, v2, v3 := FingerprintOf("v1"), FingerprintOf("v2"), FingerprintOf("v3")
	kept, _ := Epoch{Model: "m"}.Announced("k:1", v1)
	kept, _ = kept.Announced("k:2", v2)
	newer, _ := Epoch{Model: "m"}.Announced("k:3", v3)
	if got := newer.Merged(kept); got.Weights != "k:3" || got.Number != 3 || len(got.Old) != 2 {
		t.Errorf("new weights: %+v", got)
	}
	older, _ := Epoch{Model: "m"}.Announced("k:1", v1)
	if got := older.Merged(kept); got.Weights != "k:2" || got.Number != 2 || len(got.Old) != 1 {
		t.Errorf("an old worker came first: %+v", got)
	}
	if got := kept.Merged(older); cmp.Diff(kept, got) != "" {
		t.Errorf("nothing new: %+v", got)
	}
}

// TestEpochBounds: a record does not grow for ever.
func TestEpochBounds(t *testing.T) {
	e := Epoch{Model: "m"}
	for i := range 200 {
		for j := range 3 {
			e, _ = e.Announced(fmt.Sprint("k:", i), FingerprintOf(fmt.Sprint(i, j)))
		}
	}
	if len(e.Past) != mostPast || len(e.Old) != mostVersions || e.Number != 200 {
		t.Errorf("%d past weights, %d old versions", len(e.Past), len(e.Old))
	}
	for i := range 200 {
		e, _ = e.Announced(e.Weights, FingerprintOf(fmt.Sprint("more", i)))
	}
	if len(e.Fingerprints) != mostVersions {
		t.Errorf("%d fingerprints", len(e.Fingerprints))
	}
}

// TestEpochKey: what names weights, and what does not.
func TestEpochKey(t *testing.T) {
	if k, err := EpochKeyOf("m", "sha256:ab:c"); err != nil || k != (EpochKey{"m", "sha256"}) {
		t.Errorf("%v, %v", k, err)
	}
	for _, bad := range [][2]string{{"m", "sha256"}, {"m", ":x"}, {"m", "x:"}, {"", "k:x"}, {"m", "k:" + string(make([]byte, 600))}} {
		if _, err := EpochKeyOf(bad[0], bad[1]); err == nil {
			t.Errorf("%.40q is taken", bad)
		}
	}
}
