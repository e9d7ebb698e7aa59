//go:build unix

package dirstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvmesh/kvmesh/kvcache"
)

var _ kvcache.Labeled = (*Store)(nil)

// labelName is the label's file in the folder of a model: JSON.
const labelName = "label"

// mostLabel bounds what is read of a label in bytes.
const mostLabel = 4096

// Label implements kvcache.Labeled.
func (s *Store) Label(ctx context.Context, f kvcache.Fingerprint, l kvcache.Label) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.leave()
	if _, err := s.root.Lstat(modelDir(f) + "/" + labelName); err == nil {
		return nil
	}
	text, err := json.Marshal(l)
	if err == nil && len(text) > mostLabel {
		err = fmt.Errorf("%d bytes, at most %d", len(text), mostLabel)
	}
	if err != nil {
		return fmt.Errorf("label model %s: %w", f, err)
	}
	file, err := s.publish(modelDir(f), labelName, text, true)
	if errors.Is(err, fs.ErrExist) {
		return nil // another process was faster
	}
	if err != nil {
		return s.count.Failure(fmt.Errorf("label model %s: %w", f, err))
	}
	s.control.addUsed(room(int64(len(text))))
	return file.Close()
}

// label reads a model's label; one that is missing or no JSON is empty.
func (s *Store) label(f kvcache.Fingerprint) (l kvcache.Label) {
	text, err := s.readFile(modelDir(f)+"/"+labelName, mostLabel)
	if err != nil || json.Unmarshal(text, &l) != nil {
		return kvcache.Label{}
	}
	return l
}
