//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// epochsFile is the file's content.
type epochsFile struct {
	Version int             `json:"version"`
	Epochs  []kvcache.Epoch `json:"epochs"`
	// Names are those under which models were served here, the newest last.
	Names []modelName `json:"names,omitempty"`
	// Owed are drops that tiers have not done.
	Owed []stack.Owed `json:"owed,omitempty"`
}

const (
	epochsVersion = 1
	mostEpochFile = 64 << 20
)

// readEpochs reads a file; one that is not there is the zero one.
func readEpochs(name string) (f epochsFile, err error) {
	st, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err == nil && (!st.Mode().IsRegular() || st.Size() > mostEpochFile) {
		err = fmt.Errorf("%s is no file of epochs", name)
	}
	if err != nil {
		return f, err
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return f, err
	}
	return parseEpochs(text)
}

// parseEpochs reads what textLocked wrote.
func parseEpochs(text []byte) (f epochsFile, err error) {
	if err := json.Unmarshal(text, &f); err != nil {
		return epochsFile{}, fmt.Errorf("file of epochs: %w", err)
	}
	if f.Version != epochsVersion {
		return epochsFile{}, fmt.Errorf("file of epochs: version %d is not known", f.Version)
	}
	return f, nil
}

// textLocked is the content of the file.
func (e *Epochs) textLocked() ([]byte, error) {
	return json.Marshal(epochsFile{epochsVersion, e.listLocked(), e.names, append(e.owed[:len(e.owed):len(e.owed)], e.fresh...)})
}

// saveLocked writes the file.
func (e *Epochs) saveLocked() error {
	e.unsaved = true
	text, err := e.textLocked()
	if err != nil {
		return fmt.Errorf("keep epochs: %w", err)
	}
	err = writeWhole(e.cfg.File, text)
	e.unsaved = err != nil
	return err
}

// saveRestLocked writes the file where that failed the last time: who asks again for what
// memory has already is told that it is kept only when it is.
func (e *Epochs) saveRestLocked() error {
	if !e.unsaved {
		return nil
	}
	return e.saveLocked()
}

// catchUp brings the file and the copy up to date.
func (e *Epochs) catchUp(ctx context.Context) error {
	e.mu.Lock()
	err := e.saveRestLocked()
	e.mu.Unlock()
	return errors.Join(err, e.writeCopy(ctx))
}

// writeWhole writes a file of mode 0600 that is never seen in part, also after a crash.
func writeWhole(name string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".new-*")
	if err != nil {
		return fmt.Errorf("keep epochs: %w", err)
	}
	if _, err = f.Write(text); err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // it may have gone
		return fmt.Errorf("keep epochs: %w", err)
	}
	return nil
}

// tidy removes what a node that was killed was writing.
func tidy(name string) {
	left, _ := filepath.Glob(name + ".new-*") // the pattern is right
	for _, one := range left {
		_ = os.Remove(one) // it is in nobody's way
	}
}

// writeCopy brings the copy up to date.
func (e *Epochs) writeCopy(ctx context.Context) error {
	e.mu.Lock()
	if e.cfg.Copy == "" || !e.merged || !e.behind || ctx.Err() != nil {
		e.mu.Unlock()
		return nil
	}
	e.behind = false
	text, err := e.textLocked()
	e.mu.Unlock()
	if err == nil {
		err = writeWhole(e.cfg.Copy, text)
	}
	if err != nil {
		e.mu.Lock()
		e.behind = true
		e.mu.Unlock()
	}
	return err
}
