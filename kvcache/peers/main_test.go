package peers_test

import (
	"errors"
	"os"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(kvtest.ChildEnv); spec != "" {
		kvtest.Child(spec, func(string, int64) (kvcache.Store, error) { return nil, errors.New("this store has one process") })
	}
	os.Exit(m.Run())
}
