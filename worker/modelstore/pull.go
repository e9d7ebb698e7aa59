package modelstore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// How a pull behaves.
const (
	atOnce     = 4                      // files fetched side by side
	tries      = 5                      // in a row without a single byte
	firstPause = 200 * time.Millisecond // before the second try
	lastPause  = 5 * time.Second
	partSuffix = ".part" // of a file that is not whole or not checked
)

// Progress is called while a pull runs, by several goroutines: done of total bytes
// of all files are here. It must be quick.
type Progress func(done, total int64)

// Pull fetches the version that a manifest describes into the store. What is there
// already is not fetched again: of a version nothing, of a pull that was cut the
// missing bytes. A version appears when all of it is there and checked.
func (s *Store) Pull(ctx context.Context, from Sources, manifest string, progress Progress) (Model, error) {
	m, err := from.manifest(ctx, manifest)
	if err != nil {
		return Model{}, err
	}
	unlock, err := s.lock(ctx, m.Ref())
	if err != nil {
		return Model{}, err
	}
	defer unlock()
	if have, err := s.Find(m.Ref()); err == nil {
		if !reflect.DeepEqual(have.Manifest, m) {
			return Model{}, fmt.Errorf("%s is in the store with other content: a version never changes, so give the new one a name of its own", m.Ref())
		}
		return have, nil
	}
	p := &pull{store: s, from: from, manifest: m, location: manifest, progress: progress}
	if err := p.run(ctx); err != nil {
		return Model{}, fmt.Errorf("pull %s: %w", m.Ref(), err)
	}
	return s.Find(m.Ref())
}

// manifest reads and checks a manifest.
func (s Sources) manifest(ctx context.Context, location string) (Manifest, error) {
	var raw []byte
	err := retry(ctx, func() (bool, error) {
		body, _, err := s.open(ctx, location, 0)
		if err != nil {
			return false, err
		}
		raw, err = io.ReadAll(io.LimitReader(body, maxManifest+1))
		return false, errors.Join(err, body.Close())
	})
	if err != nil {
		return Manifest{}, fmt.Errorf("read the manifest: %w", err)
	}
	m, err := ParseManifest(raw)
	if err != nil {
		return m, fmt.Errorf("%s: %w", shown(location), err)
	}
	return m, nil
}

// retry repeats what may work another time. try reports whether it got any further,
// after which the patience begins anew.
func retry(ctx context.Context, try func() (further bool, err error)) error {
	pause := firstPause
	for failed := 0; ; {
		further, err := try()
		if err == nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		failed++
		if further {
			failed, pause = 0, firstPause
		}
		if !passing(err) || failed >= tries {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, lastPause)
	}
}

// pull is one version on its way.
type pull struct {
	store    *Store
	from     Sources
	manifest Manifest
	location string
	progress Progress
	done     atomic.Int64 // bytes that are here
}

// run fetches into the staging folder and publishes it. The caller holds the lock.
func (p *pull) run(ctx context.Context) error {
	staging := p.store.staging(p.manifest.Ref())
	if err := os.MkdirAll(staging, 0o755); err != nil {
		return err
	}
	// What is cleared away behind a link is not the store's.
	for _, dir := range []string{filepath.Dir(staging), staging} {
		if st, err := os.Lstat(dir); err != nil || !st.IsDir() {
			return errors.Join(fmt.Errorf("%s is no folder of the store but a link: remove it", dir), err)
		}
	}
	root, err := os.OpenRoot(staging)
	if err != nil {
		return err
	}
	defer root.Close()
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, f := range p.manifest.Files {
		group.Go(func() error { return p.file(gctx, root, f) })
	}
	if err := group.Wait(); err != nil {
		return errors.Join(err, p.prune(root, staging))
	}
	// What another manifest of the version left is no part of this one.
	if err := p.prune(root, staging); err != nil {
		return err
	}
	return p.publish(root, staging)
}

// prune removes what no later pull can go on with: files that the manifest does not name,
// parts without a byte, and folders without a file; at last the staging folder itself.
func (p *pull) prune(root *os.Root, staging string) error {
	useful := map[string]bool{}
	for _, f := range p.manifest.Files {
		useful[f.Path], useful[f.Path+partSuffix] = true, true
	}
	var dirs []string
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			dirs = append(dirs, name)
			return nil
		}
		st, err := d.Info()
		if err == nil && useful[name] && (st.Size() > 0 || !strings.HasSuffix(name, partSuffix)) {
			return nil
		}
		return errors.Join(err, root.Remove(name))
	})
	if err != nil {
		return fmt.Errorf("clean up after it: %w", err)
	}
	for _, dir := range slices.Backward(dirs[1:]) {
		_ = root.Remove(dir) // fails where there is something in it
	}
	_ = os.Remove(staging) // the same
	return nil
}

// publish writes the manifest and gives the folder its name, in this order, so that
// a folder with that name is whole whenever the process or the machine dies.
func (p *pull) publish(root *os.Root, staging string) error {
	raw, err := json.MarshalIndent(p.manifest, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the manifest: %w", err)
	}
	if err := root.WriteFile(manifestName, append(raw, '\n'), 0o644); err != nil {
		return err
	}
	if err := syncPath(filepath.Join(staging, manifestName)); err != nil {
		return err
	}
	target := p.store.folder(p.manifest.Ref())
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	// A folder that is there is no whole version: Find would have found it.
	if err := os.RemoveAll(target); err != nil {
		return err
	}
	if err := os.Rename(staging, target); err != nil {
		return err
	}
	return syncPath(filepath.Dir(target))
}

// file fetches one file, unless a pull before did.
func (p *pull) file(ctx context.Context, root *os.Root, f File) error {
	if here, err := p.staged(ctx, root, f); here || err != nil {
		return err
	}
	location, err := beside(p.location, f)
	if err != nil {
		return err
	}
	if err := root.MkdirAll(path.Dir(f.Path), 0o755); err != nil {
		return err
	}
	part, err := root.OpenFile(f.Path+partSuffix, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	t := &transfer{pull: p, file: f, location: location, part: part}
	err = t.run(ctx)
	if err == nil {
		err = part.Sync()
	}
	if err := errors.Join(err, part.Close()); err != nil {
		if wrong(err) { // its bytes are of no use to a later pull
			return errors.Join(err, root.Remove(f.Path+partSuffix))
		}
		return err
	}
	return root.Rename(f.Path+partSuffix, f.Path)
}

// staged reports whether a pull before fetched a file. It was checked then, against the
// manifest of then: one that the publisher has corrected since means another file.
func (p *pull) staged(ctx context.Context, root *os.Root, f File) (bool, error) {
	st, err := root.Stat(f.Path)
	if err != nil || !st.Mode().IsRegular() || st.Size() != f.Size {
		return false, nil
	}
	file, err := root.Open(f.Path)
	if err != nil {
		return false, err
	}
	defer file.Close()
	got, err := hashOf(ctx, file)
	if err != nil {
		return false, fmt.Errorf("%s: %w", f.Path, err)
	}
	if got != f.SHA256 {
		return false, nil
	}
	p.advance(f.Size)
	return true, nil
}

// advance notes bytes that have come, or fewer.
func (p *pull) advance(n int64) {
	done := p.done.Add(n)
	if p.progress != nil {
		p.progress(done, p.manifest.Bytes())
	}
}

// transfer is one file on its way.
type transfer struct {
	pull     *pull
	file     File
	location string
	part     *os.File
	have     int64     // bytes in part
	ended    int64     // where a connection came to a regular end too early; twice there is no accident
	sum      hash.Hash // over them
}

// HashError says that a file is not the one the manifest means.
type HashError struct {
	Path      string // in the model's folder
	Want, Got string // SHA-256 in hexadecimal digits
}

// Error names the file, the wanted hash and the one it has.
func (e *HashError) Error() string {
	return fmt.Sprintf("%s: sha256 is %s, the manifest says %s", e.Path, e.Got, e.Want)
}

// The errors for a source whose size is not the manifest's.
var (
	errLonger  = errors.New("the source is longer than the manifest says")
	errShorter = errors.New("the source is shorter than the manifest says")
)

// wrong reports whether an error says that what is here is of another file.
func wrong(err error) bool {
	_, hash := errors.AsType[*HashError](err)
	return hash || errors.Is(err, errLonger) || errors.Is(err, errShorter) || errors.Is(err, errRange)
}

// run fetches what is missing. A part that an earlier pull left may be of another
// file; when the whole is wrong it is fetched once more from the beginning.
func (t *transfer) run(ctx context.Context) error {
	if err := t.recall(ctx); err != nil {
		return err
	}
	resumed := t.have > 0
	err := t.fetch(ctx)
	if wrong(err) && resumed {
		if err := t.rewind(); err != nil {
			return err
		}
		err = t.fetch(ctx)
	}
	return err
}

// recall hashes what an earlier pull left.
func (t *transfer) recall(ctx context.Context) error {
	st, err := t.part.Stat()
	if err != nil {
		return err
	}
	t.sum = sha256.New()
	if st.Size() > t.file.Size {
		return t.rewind()
	}
	n, err := io.Copy(t.sum, contextReader{ctx, t.part})
	t.have = n
	t.pull.advance(n)
	return err
}

// rewind forgets everything.
func (t *transfer) rewind() error {
	t.pull.advance(-t.have)
	t.have = 0
	t.sum.Reset()
	_, err := t.part.Seek(0, io.SeekStart)
	return errors.Join(err, t.part.Truncate(0))
}

// fetch gets the missing bytes, in as many connections as it takes, and compares the
// hash.
func (t *transfer) fetch(ctx context.Context) error {
	err := retry(ctx, func() (bool, error) {
		before := t.have
		err := t.once(ctx)
		return t.have > before, err
	})
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(t.sum.Sum(nil)); got != t.file.SHA256 {
		return &HashError{t.file.Path, t.file.SHA256, got}
	}
	return nil
}

// once reads one connection to its end.
func (t *transfer) once(ctx context.Context) error {
	if t.have == t.file.Size {
		return nil
	}
	body, at, err := t.pull.from.open(ctx, t.location, t.have)
	if errors.Is(err, errRange) {
		// What is here is of another file.
		return errors.Join(temporary{err}, t.rewind())
	}
	if err != nil {
		return err
	}
	defer body.Close()
	if at != t.have {
		if err := t.rewind(); err != nil {
			return err
		}
	}
	// One byte more than wanted tells a file that is too long.
	_, err = io.Copy(t, contextReader{ctx, io.LimitReader(body, t.file.Size-t.have+1)})
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", t.file.Path, err)
	case t.have < t.file.Size && t.have == t.ended:
		return fmt.Errorf("%s: %w: %d of %d bytes", t.file.Path, errShorter, t.have, t.file.Size)
	case t.have < t.file.Size:
		t.ended = t.have
		return temporary{fmt.Errorf("%s: %w: %d of %d bytes", t.file.Path, errShorter, t.have, t.file.Size)}
	}
	return nil
}

// Write implements io.Writer: to disk, into the hash, and into the progress.
func (t *transfer) Write(b []byte) (int, error) {
	if t.have+int64(len(b)) > t.file.Size {
		return 0, fmt.Errorf("%w: %d bytes", errLonger, t.file.Size)
	}
	n, err := t.part.Write(b)
	t.sum.Write(b[:n])
	t.have += int64(n)
	t.pull.advance(int64(n))
	return n, err
}

// contextReader stops reading when its context ends. What the network says is
// temporary; a disk's errors come from the writer.
type contextReader struct {
	ctx  context.Context
	from io.Reader
}

// Read implements io.Reader.
func (r contextReader) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := r.from.Read(b)
	if err != nil && !errors.Is(err, io.EOF) && r.ctx.Err() == nil {
		err = temporary{err}
	}
	return n, err
}
