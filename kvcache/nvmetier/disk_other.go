//go:build unix && !linux

package nvmetier

// direct is nothing where there is no O_DIRECT.
const direct = 0

// forget does nothing where the system cannot be told.
func forget(int) {}
