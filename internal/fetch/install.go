package fetch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// staging is the working folder of one asset, used only under its lock.
type staging struct {
	root string
	// run is this run's own folder for what is unfinished. A client that
	// outlived its killed kvmesh goes on in another one, which is removed
	// under its feet, and never meets this run's files.
	run string
}

// newStaging makes the folders and removes what an interrupted run left half
// done. Finished packages stay.
func newStaging(root string) (staging, error) {
	s := staging{root: root}
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	for _, e := range entries {
		if e.Name() != filepath.Base(s.dl()) {
			// Its orphan may be writing there right now; it ends by itself.
			_ = os.RemoveAll(filepath.Join(root, e.Name()))
		}
	}
	if err := os.MkdirAll(s.dl(), 0o755); err != nil {
		return s, err
	}
	if s.run, err = os.MkdirTemp(root, "run-"); err != nil {
		return s, err
	}
	return s, errors.Join(os.Mkdir(s.out(), 0o755), os.Mkdir(s.tmp(), 0o755))
}

// dl keeps finished packages, also over an interruption.
func (s staging) dl() string { return filepath.Join(s.root, "dl") }

// tmp is where pip and npm put what they are downloading, and its result.
func (s staging) tmp() string { return filepath.Join(s.run, "tmp") }

// out is the asset being unpacked.
func (s staging) out() string { return filepath.Join(s.run, "out") }

// install returns the asset's folder, filling it first when it is not whole.
func install(ctx context.Context, cfg Config, a asset) (string, error) {
	dir := a.dir(cfg)
	if complete(dir, a) {
		return dir, nil
	}
	// From here on this is the only process that touches the asset. The lock is
	// per asset, so two clones can fetch different ones at the same time.
	unlock, err := lock(ctx, cfg, a)
	if err != nil {
		return "", err
	}
	defer unlock()
	// Another caller may have finished while this one waited. A copied cache has
	// other times but the same content, and only needs a new manifest.
	if complete(dir, a) {
		return dir, nil
	}
	switch err := verify(ctx, dir, a); {
	case err == nil:
		return dir, writeManifest(dir, a)
	case ctx.Err() != nil:
		return "", ctx.Err()
	case exists(dir):
		fmt.Fprintf(cfg.Progress, "%s %s: the copy in the cache is damaged and is fetched again: %v\n", a.name, a.version, err)
	}
	s, err := newStaging(filepath.Join(cfg.CacheDir, "staging", a.key()))
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(s.run)
	if err := room(cfg, a); err != nil {
		return "", err
	}
	if err := download(ctx, cfg, a, s); err != nil {
		return "", err
	}
	if err := build(ctx, a, s); err != nil {
		return "", err
	}
	return dir, publish(dir, s)
}

// exists reports whether something is at path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// lock takes the asset's lock, which the kernel gives back if the process dies.
func lock(ctx context.Context, cfg Config, a asset) (unlock func(), err error) {
	// The file is never removed: a lock on a removed file would hold nobody back.
	path := filepath.Join(cfg.CacheDir, "lock", a.key())
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	// A blocking flock could not be interrupted by the context.
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for told := false; ; told = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !told {
			fmt.Fprintf(cfg.Progress, "%s %s: another process is fetching it, waiting\n", a.name, a.version)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

// room refuses to start what the disk cannot hold.
func room(cfg Config, a asset) error {
	need := a.download() + a.unpacked
	free, err := Free(cfg.CacheDir)
	if err != nil {
		return err
	}
	if free < need {
		return withHint(fmt.Errorf("%s: needs %s of disk, %s are free", cfg.CacheDir, size(need), size(free)),
			"free some, or set XDG_CACHE_HOME to a folder on a larger disk")
	}
	return nil
}

// Free returns the bytes that an ordinary user may still write at path.
func Free(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("free disk at %s: %w", path, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// download brings every package into s.dl, and leaves those that are there.
func download(ctx context.Context, cfg Config, a asset, s staging) error {
	m := newMeter(cfg, a.name+" "+a.version, a.download())
	var done int64
	for _, p := range a.pkgs {
		if check(ctx, filepath.Join(s.dl(), p.file), p.file, p.size, p.sha256) != nil {
			stop := m.watch(func() int64 { return done + min(p.size, usage(s.tmp())) })
			err := bring(ctx, cfg, p, s)
			stop()
			if err != nil {
				m.abort()
				return err
			}
		}
		done += p.size
	}
	m.finish()
	return nil
}

// bring downloads one package, checks it, and only then puts it into s.dl.
func bring(ctx context.Context, cfg Config, p pkg, s staging) error {
	if err := p.client.get(ctx, cfg, p, s); err != nil {
		return err
	}
	got := filepath.Join(s.tmp(), p.file)
	if err := check(ctx, got, p.file, p.size, p.sha256); err != nil {
		return wrongPackage(err, p)
	}
	if err := os.Rename(got, filepath.Join(s.dl(), p.file)); err != nil {
		return err
	}
	// The next package's progress starts at 0, and npm's private cache goes.
	return s.clearTmp()
}

// clearTmp empties the clients' temporary folder.
func (s staging) clearTmp() error {
	if err := os.RemoveAll(s.tmp()); err != nil {
		return err
	}
	return os.Mkdir(s.tmp(), 0o755)
}

// build unpacks all packages into s.out, makes the links and checks the pins.
func build(ctx context.Context, a asset, s staging) error {
	root, err := os.OpenRoot(s.out())
	if err != nil {
		return err
	}
	defer root.Close()
	for _, p := range a.pkgs {
		if err := unpack(ctx, filepath.Join(s.dl(), p.file), root, p.take); err != nil {
			return fmt.Errorf("unpack %s: %w", p.file, err)
		}
	}
	for name, target := range a.links {
		if err := root.Symlink(target, name); err != nil {
			return err
		}
	}
	for _, f := range a.files {
		if err := check(ctx, filepath.Join(s.out(), f.name), f.name, f.size, f.sha256); err != nil {
			return err
		}
	}
	return writeManifest(s.out(), a)
}

// publish puts the finished asset in its place. A damaged one is moved away
// first; programs that have its files open keep them.
func publish(dir string, s staging) error {
	// The order matters: until the last rename there is either the old folder or
	// none, and a run that dies in between starts again with what it downloaded.
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(s.root, "old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(s.out(), dir); err != nil {
		return err
	}
	return os.RemoveAll(s.root)
}

// usage returns the bytes of all regular files below dir. Files come and go
// while a client works, so what cannot be read counts as nothing.
func usage(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			n += info.Size()
		}
		return nil
	})
	return n
}
