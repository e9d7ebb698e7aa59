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
