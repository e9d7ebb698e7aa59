//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// of makes a block of a tenant.
func of(t *testing.T, tenant string) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace("m", []byte(tenant))
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1}}, []kvcache.Part{{Size: 5}}, []byte("state"))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestEraseTenant: a tenant is erased in the memory and on the disk, others are not; a tier
// that cannot is named.
func TestEraseTenant(t *testing.T) {
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	n, c := startFar(t, stack.Tier{Name: "nvme", Store: disk})
	acme, other := of(t, "acme"), of(t, "other")
	for _, f := range []*kvcache.Frame{acme, other} {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	for n.below.Behind() > 0 {
		<-time.After(time.Millisecond)
	}
	told := 0
	e, err := c.EraseTenant(t.Context(), "acme", func(Erased) { told++ })
	if err != nil || !e.Done || e.Blocks != 2 || e.Looked < 4 || told == 0 {
		t.Errorf("%+v, %v", e, err)
	}
	for _, s := range []kvcache.Store{c, disk} {
		if _, err := s.Get(t.Context(), acme.Ref); !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("it is still there: %v", err)
		}
		l, err := s.Get(t.Context(), other.Ref)
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	if e, err := c.EraseTenant(t.Context(), "acme", func(Erased) {}); err != nil || e.Blocks != 0 {
		t.Errorf("once more: %+v, %v", e, err)
	}
	if _, err := c.EraseTenant(t.Context(), "", func(Erased) {}); err == nil {
		t.Error("nobody was erased")
	}
	_, c = startFar(t, stack.Tier{Name: "else", Store: unable{disk}})
	if _, err := c.EraseTenant(t.Context(), "acme", func(Erased) {}); err == nil || !strings.Contains(err.Error(), "tier else") {
		t.Errorf("a tier that cannot: %v", err)
	}
}

// unable is a store that cannot erase a tenant, and finds nothing.
type unable struct{ kvcache.Store }

// Put implements kvcache.Store.
func (unable) Put(context.Context, *kvcache.Frame) error { return nil }

// TestPeers: a node says who the other hosts are, and one that knows none says that.
func TestPeers(t *testing.T) {
	_, c := startFar(t)
	if _, err := c.Peers(t.Context()); err == nil || !strings.Contains(err.Error(), errNoPeers.Error()) {
		t.Errorf("without peers: %v", err)
	}
	s := &Server{peers: func() Peers { return Peers{ID: "a", Nodes: []PeerNode{{ID: "b", Owed: 2}}} }}
	b, err := s.others()
	var p Peers
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil || p.ID != "a" || len(p.Nodes) != 1 || p.Nodes[0].Owed != 2 {
		t.Errorf("%+v, %v", p, err)
	}
}
