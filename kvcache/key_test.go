package kvcache

import "testing"

// TestKeysDiffer: whatever changes, the key does.
func TestKeysDiffer(t *testing.T) {
	ids := make([]int32, 200) // longer than the room on the stack
	for i := range ids {
		ids[i] = int32(i)
	}
	space := NewSpace("model", []byte("salt"))
	seen := map[Key]string{}
	add := func(name string, k Key) {
		if old, ok := seen[k]; ok {
			t.Errorf("%s has the key of %s", name, old)
		}
		seen[k] = name
	}
	add("root", space.Root)
	add("root of another model", Root("model 2", []byte("salt")))
	add("root of another tenant", Root("model", []byte("salt 2")))
	add("root of no tenant", Root("model", nil))
	// A tenant cannot choose a salt that makes it another model's.
	add("root of text moved into the salt", Root("mode", []byte("lsalt")))
	add("block", space.Key(space.Root, ids))
	add("shorter block", space.Key(space.Root, ids[:199]))
	add("no tokens", space.Key(space.Root, nil))
	add("block of another parent", space.Key(space.Key(space.Root, ids), ids))
	add("block of another model", Space{FingerprintOf("model 2"), space.Root}.Key(space.Root, ids))
	add("block of another tenant", NewSpace("model", nil).Key(Root("model", nil), ids))
	for i := range ids {
		ids[i]++
		add("block with another token", space.Key(space.Root, ids))
		ids[i]--
	}
	if k := space.Key(space.Root, ids); seen[k] != "block" {
		t.Error("equal tokens have another key")
	}
}

func TestParseKey(t *testing.T) {
	k := Root("model", nil)
	if got, err := ParseKey(k.String()); err != nil || got != k {
		t.Errorf("got %v, %v", got, err)
	}
	for _, s := range []string{"", "00", k.String()[1:], k.String() + "0", "g" + k.String()[1:], "../../../../etc/passwd"} {
		if got, err := ParseKey(s); err == nil || got != (Key{}) {
			t.Errorf("ParseKey(%q) = %v, %v", s, got, err)
		}
	}
}
