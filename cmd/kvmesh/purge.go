package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

func purgeCommand(e *env) *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "purge",
		Short: "Remove what was fetched, and what runs left in this clone",
		Long: `Purge removes the cache of fetched assets, which all clones share, and this
clone's .tools and .kvmesh (links, logs, the state of the last run). It says
what each is and how big. Files that KVMESH_* variables name are not touched.`,
		Example: "  kvmesh purge --dry-run   # only say what would go\n  kvmesh purge",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return purge(e, dryRun)
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be removed and remove nothing")
	return c
}

// purge removes every folder that kvmesh makes for itself.
func purge(e *env, dryRun bool) error {
	cache, err := e.cacheDir()
	if err != nil {
		return err
	}
	dirs := []string{cache}
	here := cloneRoot()
	if here == "" {
		if here, err = os.Getwd(); err != nil {
			return fmt.Errorf("working folder: %w", err)
		}
	}
	dirs = append(dirs, filepath.Join(here, ".tools"), filepath.Join(here, ".kvmesh"))
	for _, dir := range dirs {
		size, err := treeSize(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("purge %s: %w", dir, err)
		}
		verb := "removing"
		if dryRun {
			verb = "would remove"
		}
		fmt.Fprintf(e.stdout, "%s %s (%.1f MB)\n", verb, dir, float64(size)/1e6)
		if dryRun {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("purge %s: %w", dir, err)
		}
	}
	return nil
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
