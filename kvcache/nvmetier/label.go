//go:build unix

package nvmetier

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/evict"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

const (
	// labelName is the file of a model's label, beside the folders of its tenants.
	labelName = "label"
	// mostLabel bounds what is read of one.
	mostLabel = 2 * page
	// deadAfter is how long an older version of a model must be unused for its blocks to
	// go first.
	deadAfter = time.Minute
)

// model is what is known of one fingerprint with a label.
type model struct {
	Label kvcache.Label `json:"label"`
	// Order is that in which models were labelled, from 1 on.
	Order uint64 `json:"order"`

	used time.Time
}

// Label implements kvcache.Labeled. Of models of one name the blocks of older ones go
// first. It writes a file for a model that it does not know.
func (s *Store) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	if s.labelled(f) {
		return nil
	}
	_, op, err := s.ops.Begin(ctx, remote.OpPut)
	if err != nil {
		return err
	}
	return op.End(s.label(f, l))
}

// labelled says whether a model has a label, and notes its use.
func (s *Store) labelled(f kvcache.Fingerprint) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.index.models[f]
	if m != nil {
		m.used = time.Now()
	}
	return m != nil
}

func (s *Store) label(f kvcache.Fingerprint, l kvcache.Label) error {
	s.publish.Lock()
	defer s.publish.Unlock()
	if s.labelled(f) {
		return nil
	}
	s.mu.Lock()
	m := &model{Label: l, Order: s.index.lastOrder() + 1, used: time.Now()}
	s.mu.Unlock()
	text, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("label model %s: %w", f, err)
	}
	if len(text) > mostLabel {
		return fmt.Errorf("label model %s: %d bytes, at most %d", f, len(text), mostLabel)
	}
	temp := s.scratch(tmpDir)
	err = s.writeFile(temp, text)
	if err == nil {
		if err = s.disk.Mkdir(modelDir(f)); err == nil || errors.Is(err, fs.ErrExist) {
			err = s.disk.Rename(temp, modelDir(f)+"/"+labelName)
		}
	}
	if err != nil {
		_ = s.disk.Remove(temp) // or it is removed when the directory is opened again
		return fmt.Errorf("label model %s: %w", f, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.index.models[f] = m
	return nil
}

// Labels implements kvcache.Lister.
func (s *Store) Labels(context.Context) (map[kvcache.Fingerprint]kvcache.Label, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	labels := map[kvcache.Fingerprint]kvcache.Label{}
	for i := range s.index.entries {
		if e := &s.index.entries[i]; e.live {
			labels[s.index.spaces[e.space].Fingerprint] = kvcache.Label{}
		}
	}
	for f, m := range s.index.models {
		labels[f] = m.Label
	}
	return labels, nil
}

// readLabel takes a model's label over. One that cannot be read is as good as none.
func (s *Store) readLabel(f kvcache.Fingerprint) {
	buf := s.buffers.get(mostLabel)
	defer s.buffers.put(buf)
	n, err := s.readFile(modelDir(f)+"/"+labelName, os.O_RDONLY, buf)
	m := &model{used: time.Now()}
	if err == nil {
		err = json.Unmarshal(buf[:n], m)
	}
	if err != nil || m.Order == 0 {
		s.cfg.Log.Warn("KV store on a disk: the label of a model is not whole", "model", f, "err", err)
		return
	}
	s.index.models[f] = m
}

// lastOrder is the highest that was given.
func (x *index) lastOrder() (last uint64) {
	for _, m := range x.models {
		last = max(last, m.Order)
	}
	return last
}

// judge finds the versions of models that are dead: another one of the same name came
// later, and this one has not been used for a while.
func (x *index) judge(now time.Time) {
	if now.Sub(x.judged) < time.Second {
		return
	}
	x.judged = now
	newest := map[string]uint64{}
	for _, m := range x.models {
		newest[m.Label.Model] = max(newest[m.Label.Model], m.Order)
	}
	for owner, space := range x.spaces {
		m := cmp.Or(x.models[space.Fingerprint], &model{used: now})
		x.policy.SetDead(evict.Owner(owner), m.Order > 0 && m.Order < newest[m.Label.Model] && now.Sub(m.used) >= deadAfter)
	}
}
