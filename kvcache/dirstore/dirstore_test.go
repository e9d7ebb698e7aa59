//go:build unix

package dirstore

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
)

// TestMain makes the test binary a writer where the suite started it as one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, openForSuite)
	}
	os.Exit(m.Run())
}

// openForSuite opens a store as kvtest asks for it.
func openForSuite(dir string, limit int64) (kvcache.Store, error) {
	return Open(Config{Dir: filepath.Join(dir, "store"), Limit: limit})
}

// tamper rewrites the file of a block.
func tamper(dir string, ref kvcache.Ref, change func([]byte) []byte) error {
	name := filepath.Join(dir, "store", blockName(ref))
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	// Another file: the old one may be mapped.
	if err := os.Remove(name); err != nil {
		return err
	}
	return os.WriteFile(name, change(b), 0o600)
}

func TestStore(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: openForSuite, Shared: true, Tamper: tamper})
}
