package extproc

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Config configures a Server.
type Config struct {
	// Policy is the set the picker routes by. Required, read-only.
	Policy *policy.Set
	// Picker chooses workers. Required.
	Picker *picker.Picker
	// Held is the budget, in bytes, of bodies that the gateway holds at once,
	// shared with the relay. Required.
	Held *semaphore.Weighted
	// Known says what is known of the tokens of a request's prompt, so that the worker that holds
	// its beginning is preferred. Learn, if not nil, is called with the decision. Neither waits. Nil
	// is for where nobody follows what workers hold.
	Known func(now time.Time, req *openai.Request) (known picker.Prompt, learn func(picker.Decision))
	// Registerer takes the metrics. Required.
	Registerer prometheus.Registerer
	// Log takes what an operator should know. Required.
	Log *slog.Logger
	// NewStream makes an unguessable stream id; nil takes 128 random bits in
	// base64url.
	NewStream func() string
}

// Validate fills in defaults and reports the first field that is missing.
func (c *Config) Validate() error {
	if c.NewStream == nil {
		c.NewStream = newStream
	}
	switch {
	case c.Policy == nil:
		return errors.New("extproc: Policy: missing")
	case c.Policy.Mesh.MaxBody <= 0:
		return errors.New("extproc: Policy.Mesh.MaxBody: want a positive number of bytes")
	case c.Picker == nil:
		return errors.New("extproc: Picker: missing")
	case c.Held == nil:
		return errors.New("extproc: Held: missing")
	case c.Registerer == nil:
		return errors.New("extproc: Registerer: missing")
	case c.Log == nil:
		return errors.New("extproc: Log: missing")
	}
	return nil
}

func newStream() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return base64.RawURLEncoding.EncodeToString(b[:])
}
