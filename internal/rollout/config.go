package rollout

import (
	"fmt"
	"time"
)

// DrainConfig says how to empty a worker.
type DrainConfig struct {
	// Timeout is how long it may take.
	Timeout time.Duration
	// KeepStreams lets running streams end where they are instead of moving them.
	KeepStreams bool
	// Poll is the time between two looks.
	Poll time.Duration
	// Progress is told of every change; nil for nobody.
	Progress func(Left)
}

// DrainDefaults is a drain of at most 300 s that moves the streams.
func DrainDefaults() DrainConfig {
	return DrainConfig{Timeout: 300 * time.Second, Poll: 100 * time.Millisecond}
}

// Validate reports the first field that makes no sense.
func (c DrainConfig) Validate() error {
	switch {
	case c.Timeout <= 0:
		return fmt.Errorf("drain: timeout %v: want more than 0", c.Timeout)
	case c.Poll <= 0:
		return fmt.Errorf("drain: poll %v: want more than 0", c.Poll)
	}
	return nil
}

// Config says within which bounds a rollout goes on. Defaults has the usual ones.
type Config struct {
	// Drain is how a worker is emptied. KeepStreams is decided worker by worker
	// unless set.
	Drain DrainConfig
	// Ready is how long a worker may take from its restart until it takes requests. A
	// pool below its minimum is waited for as long.
	Ready time.Duration
	// Observe is how long a new worker is watched before the next one's turn.
	Observe time.Duration
	// MaxErrorRate is the largest share of failed requests meanwhile, 0..1.
	MaxErrorRate float64
	// Poll is the time between two looks.
	Poll time.Duration
	// Save stores the plan before each step; nil for nowhere.
	Save func(Plan) error
	// Progress is told what happens, for people; nil for nobody.
	Progress func(worker, what string)
}

// Defaults gives a worker 600 s until it is ready, watches it for 10 s, and lets 5 % of
// its requests fail.
func Defaults() Config {
	return Config{Drain: DrainDefaults(), Ready: 600 * time.Second, Observe: 10 * time.Second, MaxErrorRate: 0.05, Poll: 200 * time.Millisecond}
}

// Validate reports the first field that makes no sense.
func (c Config) Validate() error {
	if err := c.Drain.Validate(); err != nil {
		return err
	}
	switch {
	case c.Ready <= 0:
		return fmt.Errorf("ready %v: want more than 0", c.Ready)
	case c.Observe < 0:
		return fmt.Errorf("observe %v: want at least 0", c.Observe)
	case !(c.MaxErrorRate >= 0 && c.MaxErrorRate <= 1): // NaN is neither
		return fmt.Errorf("largest share of failed requests %v: want 0 to 1", c.MaxErrorRate)
	case c.Poll <= 0:
		return fmt.Errorf("poll %v: want more than 0", c.Poll)
	}
	return nil
}
