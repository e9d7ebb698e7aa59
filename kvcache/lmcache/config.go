//go:build unix

package lmcache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Config says what a server serves.
type Config struct {
	// Dir is the directory of the KV node, whose memory must be in ShmDir's file system.
	Dir string
	// Weights tells the hash of the weights that an engine has loaded that calls its model
	// by a name. It may take its time: meanwhile nothing is stored for the engine. Without
	// a hash nothing ever is.
	Weights func(ctx context.Context, model string) (hash string, err error)
	// Chunk is the tokens of a chunk, a multiple of the engine's block size; 0 is 256.
	Chunk int
	// Variant is anything else that must be equal for one engine to use another's state,
	// such as a rope scaling that is given on the command line.
	Variant string
	// ShmDir is where engines open shared memory; "" is /dev/shm.
	ShmDir string
	// State is the file that keeps who is registered, for the next start; "" is a file
	// in Dir.
	State string
	// Budget bounds how long a look-up may take: at its end what was found counts, from
	// the beginning on without a gap. 0 is 2 seconds.
	Budget time.Duration
	// NodeTime bounds how long one call of an engine waits for the node; 0 is 1 second.
	NodeTime time.Duration
	// Grace is how long an engine whose connection has ended may come back, before what it
	// was reading or writing is given up; 0 is 30 seconds.
	Grace time.Duration
	// Log gets what happens to engines, never what they store; nil is silent.
	Log *slog.Logger
}

// Bounds of a configuration.
const (
	mostChunk = kvcache.MaxTokens
	stateName = "lmcache.json"
)

// Validate says what is wrong with a configuration.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("lmcache: no directory of a KV node")
	case c.Weights == nil:
		return errors.New("lmcache: no way to know an engine's weights")
	case c.Chunk < 0 || c.Chunk > mostChunk:
		return fmt.Errorf("lmcache: chunks of %d tokens, at most %d", c.Chunk, mostChunk)
	case min(c.Budget, c.NodeTime, c.Grace) < 0:
		return errors.New("lmcache: negative time")
	}
	return nil
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	c.Chunk = cmp.Or(c.Chunk, 256)
	c.ShmDir = cmp.Or(c.ShmDir, "/dev/shm")
	c.State = cmp.Or(c.State, filepath.Join(c.Dir, stateName))
	c.Budget = cmp.Or(c.Budget, 2*time.Second)
	c.NodeTime = cmp.Or(c.NodeTime, time.Second)
	c.Grace = cmp.Or(c.Grace, 30*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}
