package policy

import (
	"strings"
	"testing"
)

func TestZonesAndIDs(t *testing.T) {
	for s, want := range map[string]struct{ zone, id bool }{
		"":                       {true, false},
		"eu-1b":                  {true, true},
		"EU_1.b":                 {true, true},
		"a":                      {true, true},
		strings.Repeat("z", 63):  {true, true},
		strings.Repeat("z", 64):  {false, true},
		strings.Repeat("z", 253): {false, true},
		strings.Repeat("z", 254): {false, false},
		"a b":                    {}, "-a": {}, "a.": {}, "a/b": {}, "ä": {}, "a\nb": {}, "a,b": {},
	} {
		if got := Zone(s) == nil; got != want.zone {
			t.Errorf("zone %q: %v", s, got)
		}
		if got := WorkerID(s) == nil; got != want.id {
			t.Errorf("id %q: %v", s, got)
		}
	}
}

// What names a value that makes no sense is an error at its own line.
func TestSenselessValues(t *testing.T) {
	for text, want := range map[string]string{
		strings.Replace(pool, "zone: a", "zone: a b", 1):                                             `local[0].zone "a b": want at most 63`,
		pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {zone: -x}\n":                 `zone "-x": want at most 63`,
		pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {kv: {limit: 1}}\n":           `kv.limit 1: want at least 1Mi`,
		strings.Replace(pool, "engine: sim\n", "engine: sim\n  worker: {contextLength: 1}\n", 1):     `worker.contextLength 1: want at least 8`,
		strings.Replace(pool, "engine: sim\n", "engine: llamacpp\n  worker: {maxNumSeqs: 257}\n", 1): `worker.maxNumSeqs 257: want at most 256`,
	} {
		if _, err := Parse(File{Name: "p.yaml", Data: []byte(text)}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s\n%s", err, want, text)
		}
	}
}
