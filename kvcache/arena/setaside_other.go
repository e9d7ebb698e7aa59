//go:build unix && !linux

package arena

import "os"

// setAside does nothing: a file system that gets full while the arena grows ends the
// process.
func setAside(*os.File, int64, int64) error { return nil }

// populate does nothing.
func populate([]byte) {}

// enterPages does nothing.
func enterPages([]byte) {}

// inMemory is not known.
func inMemory(*os.File, int64) bool { return false }
