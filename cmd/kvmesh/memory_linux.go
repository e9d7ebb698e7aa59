package main

import "golang.org/x/sys/unix"

// inMemory reports whether a directory is in memory of this host.
func inMemory(dir string) bool {
	var s unix.Statfs_t
	return dir != "" && unix.Statfs(dir, &s) == nil && s.Type == unix.TMPFS_MAGIC
}
