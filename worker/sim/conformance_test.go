package sim

import (
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/enginetest"
)

func TestConformance(t *testing.T) {
	enginetest.Run(t, func(tb testing.TB) worker.Engine {
		return newEngine(tb, Config{ContextLen: 256, MaxSeqs: 3, MaxQueue: 32, ITL: 100 * time.Microsecond})
	})
}
