package nvmetier

import "golang.org/x/sys/unix"

// direct has the disk read around the page cache.
const direct = unix.O_DIRECT

// forget lets go of the copies in memory of what a file holds on the disk. That it cannot
// is no fault: they are only in the way.
func forget(fd int) { _ = unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) }
