//go:build linux

package arena

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
)

// TestMain makes the test binary a child where a test started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	os.Exit(m.Run())
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	return Open(Config{Dir: filepath.Join(dir, "arena"), Limit: limit})
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openForSuite})
}
