//go:build unix

package lmcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// stateVersion is that of the file of registrations; another one is not read.
const stateVersion = 1

// state is what the next start must know, so that engines need not notice it.
type state struct {
	Version   int         `json:"version"`
	Instances []*instance `json:"instances"`
}

// save writes the registrations, never half of them. That it cannot is a nuisance only
// after the next start: then engines have to register again.
func (s *Server) save() {
	s.saving.Lock()
	defer s.saving.Unlock()
	s.mu.Lock()
	st := state{Version: stateVersion}
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		st.Instances = append(st.Instances, s.instances[id])
	}
	text, err := json.MarshalIndent(st, "", "  ")
	s.mu.Unlock()
	if err == nil {
		err = writeWhole(s.cfg.State, text)
	}
	if err != nil {
		s.cfg.Log.Warn("registrations of engines are not kept for the next start", "err", err)
	}
}

// writeWhole writes a file of mode 0600 that is never seen in part.
func writeWhole(name string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// load takes over the registrations of the server before this one.
func (s *Server) load(now time.Time) {
	text, err := os.ReadFile(s.cfg.State)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var list []*instance
	if err == nil {
		list, err = parseState(text)
	}
	if err != nil {
		s.cfg.Log.Warn("registrations of engines cannot be read: they have to register again", "err", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range list {
		if i.Weights == "" {
			// Nothing would bind it: it has to register again.
			s.strangers[i.ID] = &stranger{seen: now}
			continue
		}
		i.seen = now
		s.instances[i.ID] = i
	}
}

// parseState reads a file of registrations.
func parseState(text []byte) ([]*instance, error) {
	var st state
	if err := json.Unmarshal(text, &st); err != nil {
		return nil, err
	}
	if st.Version != stateVersion {
		return nil, fmt.Errorf("version %d, want %d", st.Version, stateVersion)
	}
	for _, i := range st.Instances {
		if i == nil || i.World < 1 || i.World > mostWorld {
			return nil, errors.New("an engine that cannot be")
		}
		if err := i.Layout.check(); err != nil {
			return nil, err
		}
	}
	return st.Instances, nil
}
