//go:build !linux

package chaos

import (
	"testing"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// wired says that only Linux has network namespaces.
func wired(*testing.T) (*testmesh.Host, [2]string, []*trouble, error) {
	return nil, [2]string{}, nil, testmesh.ErrNoHosts
}
