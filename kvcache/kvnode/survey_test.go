//go:build unix

package kvnode

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// flipOne flips a bit at the end of one block's file below a folder.
func flipOne(t *testing.T, dir string) {
	t.Helper()
	var name string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Count(d.Name(), ".") == 6 {
			name = path
		}
		return err
	})
	var b []byte
	if err == nil {
		b, err = os.ReadFile(name)
	}
	if err == nil {
		b[len(b)-1] ^= 1
		err = os.WriteFile(name, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// awayWalker is a tier that cannot be looked at.
type awayWalker struct{ kvcache.Store }

// Walk implements kvcache.Walker.
func (awayWalker) Walk(context.Context, func(kvcache.Seen) error) error {
	return errors.New("the server is away")
}

// Check implements kvcache.Walker.
func (awayWalker) Check(context.Context, kvcache.Ref) error { return nil }

// TestSurvey: a node counts what all of its tiers have, and finds and removes the one block
// that is wrong; a tier that is away is named and keeps nobody from the others; of other
// hosts the copies of its own blocks are checked.
func TestSurvey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "nvme")
	disk, err := nvmetier.Open(nvmetier.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	others, err := dirstore.Open(dirstore.Config{Dir: filepath.Join(t.TempDir(), "others")})
	if err != nil {
		t.Fatal(err)
	}
	defer others.Close()
	n, c := startFar(t, stack.Tier{Name: "nvme", Store: disk}, stack.Tier{Name: "peers", Store: others, Apart: true}, stack.Tier{Name: "s3", Store: awayWalker{unable{disk}}})
	frames, _ := farChain(t, 12)
	if err := c.Label(t.Context(), frames[0].Fingerprint, kvcache.Label{Model: "m"}); err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		if err := c.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	settle(n)
	n.server.peers = func() Peers { return Peers{Nodes: []PeerNode{{ID: "b"}}} }
	ask := func(verify bool) map[string]TierSurvey {
		t.Helper()
		s, err := c.Survey(t.Context(), verify, func(Survey) {})
		if err != nil || !s.Done || len(s.Tiers) != 4 {
			t.Fatalf("%+v, %v", s, err)
		}
		tiers := map[string]TierSurvey{}
		for _, tier := range s.Tiers {
			tiers[tier.Tier] = tier
		}
		return tiers
	}
	tiers := ask(false)
	for _, name := range []string{"memory", "nvme"} {
		got := tiers[name]
		if len(got.Models) != 1 || got.Models[0].Blocks != 12 || got.Models[0].Tokens != 12*32 || got.Models[0].Tenants != 1 || got.Models[0].Codecs["raw"] != 12 || got.Models[0].Label.Model != "m" || got.Error != "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := tiers["peers"]; len(got.Hosts) != 1 || got.Hosts[0].ID != "b" || len(got.Models) != 0 {
		t.Errorf("other hosts: %+v", got)
	}
	if got := tiers["s3"]; got.Error != "the server is away" {
		t.Errorf("a tier that is away: %+v", got)
	}
	flipOne(t, dir)
	if err := others.Drop(t.Context(), frames[0].Fingerprint); err != nil {
		t.Fatal(err)
	}
	if err := others.Put(t.Context(), frames[0]); err != nil {
		t.Fatal(err)
	}
	for round, bad := range []int{1, 0} {
		tiers := ask(true)
		if got := tiers["nvme"]; got.Bad != bad || len(got.Faults) != bad || len(got.Models) != 1 || got.Models[0].Blocks != 11 {
			t.Errorf("round %d, disk: %+v", round, got)
		}
		if got := tiers["peers"]; !got.Copies || got.Missing != 11 || len(got.Models) != 1 || got.Models[0].Blocks != 1 {
			t.Errorf("round %d, other hosts: %+v", round, got)
		}
		if got := tiers["memory"]; got.Bad != 0 || got.Models[0].Blocks != 12 {
			t.Errorf("round %d, memory: %+v", round, got)
		}
	}
}

// TestSurveyLeft: nobody asks any more, and it ends.
func TestSurveyLeft(t *testing.T) {
	v := &survey{asked: time.Now()}
	if err := v.seen(3); err != nil || v.state.Looked != 3 {
		t.Errorf("%d, %v", v.state.Looked, err)
	}
	v.asked = v.asked.Add(-surveyPatience - 1)
	if err := v.seen(1); !errors.Is(err, errLeft) {
		t.Errorf("nobody asks: %v", err)
	}
}
