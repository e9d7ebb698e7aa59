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
type staging struct{ root string }

// dl keeps finished packages, also over an interruption.
func (s staging) dl() string { return filepath.Join(s.root, "dl") }

// tmp is where pip and npm put what they are downloading.
func (s staging) tmp() string { return filepath.Join(s.root, "tmp") }

// out is the asset being unpacked.
func (s staging) out() string { return filepath.Join(s.root, "out") }

// clean makes the folders, without what an interrupted run left half done.
func (s staging) clean() error {
	for _, dir := range []string{s.tmp(), s.out()} {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	for _, dir := range []string{s.dl(), s.tmp(), s.out()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// install returns the asset's folder, filling it first when it is not whole.
func install(ctx context.Context, cfg Config, a asset) (string, error) {
	dir := a.dir(cfg)
	if complete(dir, a) {
		return dir, nil
	}
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
	if verify(ctx, dir, a) == nil {
		return dir, writeManifest(dir, a)
	}
	s := staging{filepath.Join(cfg.CacheDir, "staging", a.key())}
	if err := s.clean(); err != nil {
		return "", err
	}
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

// lock takes the asset's lock, which the kernel gives back if the process dies.
func lock(ctx context.Context, cfg Config, a asset) (unlock func(), err error) {
	path := filepath.Join(cfg.CacheDir, "lock", a.key())
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
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
		path := filepath.Join(s.dl(), p.file)
		if check(ctx, path, p.file, p.size, p.sha256) != nil {
			os.Remove(path)
			stop := m.watch(func() int64 { return done + min(p.size, usage(s.tmp())+fileSize(path)) })
			err := p.client.get(ctx, cfg, p, s)
			stop()
			if err != nil {
				m.abort()
				return err
			}
			if err := check(ctx, path, p.file, p.size, p.sha256); err != nil {
				m.abort()
				os.Remove(path)
				return wrongPackage(err, p)
			}
			if err := s.clearTmp(); err != nil {
				return err
			}
		}
		done += p.size
	}
	m.finish()
	return nil
}

// clearTmp empties the clients' temporary folder, so that the next package's
// progress starts at 0 and npm's private cache goes.
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

// fileSize returns the size of a file, 0 when there is none.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
