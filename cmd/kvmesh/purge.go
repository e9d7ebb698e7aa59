package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/supervise"
	"github.com/kvmesh/kvmesh/kvcache/lmcache"
)

func purgeCommand(e *env) *cobra.Command {
	var dryRun, force bool
	c := &cobra.Command{
		Use:   "purge",
		Short: "Remove what was fetched, and what runs left in this clone",
		Long: `Purge removes the cache of fetched assets, which all clones share, this
clone's .tools and .kvmesh (links, logs, the state of the last run), and the folders
that runs left behind which were killed as a whole (in TMPDIR and /dev/shm). It says
what each is and how big, and what it leaves. Files that KVMESH_* variables name
are not touched. While a mesh of this folder runs, nothing is removed.`,
		Example: "  kvmesh purge --dry-run   # only say what would go\n  kvmesh purge",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return purge(e, dryRun, force)
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be removed and remove nothing")
	c.Flags().BoolVar(&force, "force", false, "remove it although a mesh of this folder runs")
	return c
}

// purge removes every folder that kvmesh makes for itself.
func purge(e *env, dryRun, force bool) error {
	cache, err := e.cacheDir()
	if err != nil {
		return err
	}
	here := cloneRoot()
	if here == "" {
		if here, err = os.Getwd(); err != nil {
			return fmt.Errorf("working folder: %w", err)
		}
	}
	state := filepath.Join(here, stateFolder)
	if pid, held := supervise.Holder(filepath.Join(state, lockFile)); held && !dryRun && !force {
		return withHint(fmt.Errorf("a mesh of this folder is running (process %d)", pid), "stop it first (Ctrl-C), or purge --force")
	}
	// Before the state, which says where some of them are.
	for _, dir := range append(leftovers(e, state), cache, filepath.Join(here, ".tools"), state) {
		if err := purgeDir(e, dir, dryRun); err != nil {
			return fmt.Errorf("purge %s: %w", dir, err)
		}
	}
	if !dryRun {
		lmcache.Tidy(shmDir)
	}
	// What others made is others' to remove.
	_, err = fmt.Fprintf(e.stdout, "left: Go's modules and build cache (go clean -modcache -cache removes them, for all of Go), %s folders elsewhere\n", stateFolder)
	return err
}

// purgeDir removes one folder and says so; one that is not there is no news.
func purgeDir(e *env, dir string, dryRun bool) error {
	size, err := treeSize(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	verb := "removing"
	if dryRun {
		verb = "would remove"
	}
	fmt.Fprintf(e.stdout, "%s %s (%.1f MB)\n", verb, dir, float64(size)/1e6)
	if dryRun {
		return nil
	}
	return os.RemoveAll(dir)
}

// treeSize sums the regular files below a folder; links are not followed.
func treeSize(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	return n, err
}
