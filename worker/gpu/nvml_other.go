//go:build !linux || !(amd64 || arm64)

package gpu

import "fmt"

// load finds nothing: NVIDIA's library is called on Linux only.
func load(string) (library, error) {
	return nil, fmt.Errorf("%w: not supported on this system", ErrAbsent)
}
