package arena

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// setAside has the file system give the memory for a part of a file now. What is in it
// stays.
func setAside(f *os.File, from, n int64) error {
	if err := unix.Fallocate(int(f.Fd()), 0, from, n); err != nil {
		return fmt.Errorf("set memory aside in %s: %w", f.Name(), err)
	}
	return nil
}

// populate has the page tables filled for a part of a mapping, as far as the kernel
// does so; later touches are then cheap.
func populate(b []byte) { _ = unix.Madvise(b, unix.MADV_POPULATE_WRITE) } // a hint

// enterPages puts pages that are there into the page tables of a mapping, for reading.
func enterPages(b []byte) { _ = unix.Madvise(b, unix.MADV_POPULATE_READ) } // a hint

// inMemory says whether a file is in shared memory, and all of it was taken.
func inMemory(f *os.File, size int64) bool {
	var fs unix.Statfs_t
	var st unix.Stat_t
	return unix.Fstatfs(int(f.Fd()), &fs) == nil && fs.Type == unix.TMPFS_MAGIC &&
		unix.Fstat(int(f.Fd()), &st) == nil && st.Blocks*512 >= size
}
