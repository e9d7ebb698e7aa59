//go:build unix

package kvnode

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
)

// EpochsName is the name of the file of epochs in a node's directory and on its disk.
const EpochsName = "epochs"

// EpochConfig says where the epochs of models are kept. Zero fields take the defaults named
// beside them.
type EpochConfig struct {
	// File is in the node's directory; required. What a client is told is in it.
	File string
	// Copy is on a disk, which has the blocks of old versions when the memory is lost;
	// default none. It is written in the background, and may hang.
	Copy string
	// Every is the time between two looks at what can be reclaimed; default 5 s.
	Every time.Duration
	// Return is how long a model's weights must not have been used for earlier ones, which
	// are, to take their place again; default 10 min.
	Return   time.Duration
	Registry prometheus.Registerer // for the metrics kvmesh_kv_epoch*; default: none
	Log      *slog.Logger          // default: silent
}

// withDefaults returns c with every zero field set.
func (c EpochConfig) withDefaults() EpochConfig {
	c.Every = cmp.Or(c.Every, 5*time.Second)
	c.Return = cmp.Or(c.Return, 10*time.Minute)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// mostEpochs is how many models have a record.
const mostEpochs = 1024

// Epochs are the records of a node's models. They are safe for concurrent use.
//
// A record is in the file before anybody is told of it, and the lock is held meanwhile: that
// is a short file in memory, and only when something has changed. The copy may be on a disk
// that hangs, so it is read and written on goroutines of its own, and what it lacks is made
// good later.
type Epochs struct {
	cfg     EpochConfig
	metrics *epochMetrics
	kick    chan struct{} // there may be something to reclaim
	news    chan struct{} // there is something to copy
	copies  chan copied   // what the copy has, when that is known

	mu      sync.Mutex
	records map[kvcache.EpochKey]kvcache.Epoch
	// standing says of each fingerprint which record it is in.
	standing map[kvcache.Fingerprint]standing
	// used is when the weights of a record were last used.
	used map[kvcache.EpochKey]time.Time
	// left is what of old versions is in memory, as it was last seen.
	left map[kvcache.Fingerprint]int64
	// unsaved says that the file does not have everything, and behind that of the copy.
	unsaved, behind bool
	merged          bool // the copy's records have been read
	dropLog
}

// standing is what a fingerprint is in its model's record.
type standing struct {
	key kvcache.EpochKey
	old bool
}

// copied is what a file of epochs has.
type copied struct {
	file epochsFile
	err  error
}

// copyTime is how long a node waits for the copy before it serves.
const copyTime = time.Second

// OpenEpochs reads the records. One that cannot be read is begun anew, which is logged: then
// the blocks of old versions are found again by those who still run them.
func OpenEpochs(cfg EpochConfig) (*Epochs, error) {
	if cfg.File == "" {
		return nil, errors.New("epochs of models: no file")
	}
	e := &Epochs{
		cfg: cfg.withDefaults(), kick: make(chan struct{}, 1), news: make(chan struct{}, 1), copies: make(chan copied, 1),
		records: map[kvcache.EpochKey]kvcache.Epoch{}, standing: map[kvcache.Fingerprint]standing{},
		used: map[kvcache.EpochKey]time.Time{}, left: map[kvcache.Fingerprint]int64{},
	}
	e.metrics = newEpochMetrics(cfg.Registry, e)
	tidy(cfg.File)
	own, err := readEpochs(cfg.File)
	e.lost = own.Version == 0
	e.take(own, err, true)
	if cfg.Copy == "" {
		e.merged = true
		return e, nil
	}
	go func() {
		tidy(cfg.Copy)
		file, err := readEpochs(cfg.Copy)
		e.copies <- copied{file, err}
	}()
	select {
	case c := <-e.copies:
		e.merge(c)
	case <-time.After(copyTime):
		e.cfg.Log.Warn("the epochs of models on the disk are still being read", "file", cfg.Copy)
	}
	return e, nil
}

// merge takes over what the copy has.
func (e *Epochs) merge(c copied) {
	// Where the file was not lost the copy may not have heard that a drop is done.
	e.take(c.file, c.err, e.lost)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.merged, e.behind = true, true
	if err := e.saveLocked(); err != nil {
		e.cfg.Log.Warn("epochs of models are not kept", "err", err)
	}
	e.wake()
}

// take takes over what was read, with the drops that wait or without them.
func (e *Epochs) take(f epochsFile, err error, owed bool) {
	if err != nil {
		e.cfg.Log.Error("epochs of models cannot be read; they begin anew", "err", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.takeNamesLocked(f.Names)
	if owed {
		e.fresh = append(e.fresh, f.Owed...)
	}
	for _, r := range f.Epochs {
		if _, err := kvcache.EpochKeyOf(r.Model, r.Weights); err != nil || r.Number == 0 {
			continue
		}
		if _, known := e.records[r.Key()]; known || len(e.records) < mostEpochs {
			e.setLocked(e.records[r.Key()].Merged(r), time.Now())
		}
	}
}

// setLocked puts a record in its place.
func (e *Epochs) setLocked(r kvcache.Epoch, now time.Time) {
	key := r.Key()
	if e.records[key].Weights != r.Weights {
		e.used[key] = now
	}
	maps.DeleteFunc(e.standing, func(_ kvcache.Fingerprint, s standing) bool { return s.key == key })
	for _, o := range r.Old {
		e.standing[o.Fingerprint] = standing{key, true}
	}
	for _, f := range r.Fingerprints {
		e.standing[f] = standing{key, false}
	}
	e.records[key] = r
}

// admits says whether a look-up of blocks of a fingerprint is to be answered: they are of
// their model's weights of today, or for a stream that goes on. It notes the use of a model,
// too, by which weights are found to be out of use (EpochConfig.Return). It is called for
// every look-up, and holds the lock for two reads of maps.
func (e *Epochs) admits(q kvcache.Query, now time.Time) bool {
	if e == nil {
		return true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	s, known := e.standing[q.Fingerprint]
	switch {
	case known && s.old && !q.Resume:
		e.metrics.refused.Inc()
		return false
	case known && !s.old:
		e.used[s.key] = now
	}
	return true
}

// announce notes whose weights a label is of, and returns when that is kept. It costs
// nothing where that is known.
func (e *Epochs) announce(f kvcache.Fingerprint, l kvcache.Label, now time.Time) error {
	if e == nil {
		return nil
	}
	if e.nameModel(f, l.Model); l.Weights == "" {
		return nil
	}
	key, err := kvcache.EpochKeyOf(l.Model, l.Weights)
	if err != nil {
		return fmt.Errorf("epoch of a model: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	was := e.recordLocked(key)
	next, changed := was.Announced(l.Weights, f)
	switch {
	case l.Weights == was.Weights:
		e.used[key] = now
	case was.Number > 0 && slices.Contains(was.Past, l.Weights) && now.Sub(e.used[key]) >= e.cfg.Return:
		next, changed = was.Next(l.Weights, f), true
	}
	if !changed {
		return e.saveRestLocked()
	}
	return e.changeLocked(was, next, now)
}

// recordLocked returns a record, or the zero one of a model.
func (e *Epochs) recordLocked(key kvcache.EpochKey) kvcache.Epoch {
	r := e.records[key]
	r.Model = key.Model
	return r
}

// changeLocked keeps a record that has changed.
func (e *Epochs) changeLocked(was, next kvcache.Epoch, now time.Time) error {
	if was.Number == 0 && len(e.records) >= mostEpochs {
		return fmt.Errorf("epoch of model %q: %d models have one", next.Model, mostEpochs)
	}
	e.setLocked(next, now)
	if was.Number > 0 && was.Number != next.Number {
		e.cfg.Log.Info("a model has other weights: what was computed with its earlier ones is refused", "model", next.Model, "epoch", next.Number, "weights", next.Weights, "before", was.Weights)
	}
	e.behind = true
	e.wake()
	return e.saveLocked()
}

// Set begins an epoch of a model with weights, KIND:HASH, which it may have had before; where
// it has them now it changes nothing.
func (e *Epochs) Set(model, weights string) (kvcache.Epoch, error) {
	key, err := kvcache.EpochKeyOf(model, weights)
	if err != nil {
		return kvcache.Epoch{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	was := e.recordLocked(key)
	if was.Weights == weights {
		return was, e.saveRestLocked()
	}
	next := was.Next(weights, kvcache.Fingerprint{})
	return next, e.changeLocked(was, next, time.Now())
}

// wake has the background look.
func (e *Epochs) wake() {
	for _, c := range []chan struct{}{e.kick, e.news} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// listLocked lists the records by model.
func (e *Epochs) listLocked() []kvcache.Epoch {
	return slices.SortedFunc(maps.Values(e.records), func(a, b kvcache.Epoch) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Weights, b.Weights))
	})
}

// EpochState is a record and what is left of its model's old versions.
type EpochState struct {
	kvcache.Epoch
	// LeftBytes are in memory, as it was last seen.
	LeftBytes int64 `json:"left_bytes"`
	// LeftVersions are those whose room has not been given back everywhere.
	LeftVersions int `json:"left_versions"`
}

// state says how all models stand.
func (e *Epochs) state() (list []EpochState) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.listLocked() {
		s := EpochState{Epoch: r}
		for _, o := range r.Old {
			s.LeftBytes += e.left[o.Fingerprint]
			if !o.Reclaimed {
				s.LeftVersions++
			}
		}
		list = append(list, s)
	}
	return list
}
