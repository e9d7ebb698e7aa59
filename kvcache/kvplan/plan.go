package kvplan

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Config is what a host does. Zero fields take the defaults named beside them.
type Config struct {
	Context int `json:"context"` // tokens of a stream at its end; default 8,192
	Output  int `json:"output"`  // of them, how many are generated; default a quarter
	Streams int `json:"streams"` // at once, of one host; default 64
	// Decode is tokens per second of one stream; default 40.
	Decode float64 `json:"decode_tokens_per_s"`
	// Prefill is tokens per second of one host's prefill; default 8,000.
	Prefill float64 `json:"prefill_tokens_per_s"`
	// Retention is how long KV is kept for prompts to come; default an hour.
	Retention time.Duration `json:"-"`
	// RF is on how many hosts a block is; default 2.
	RF int `json:"rf"`
	// Link is bytes per second that reach a host; default 1.25e9, 10 Gbit/s.
	Link float64 `json:"link_bytes_per_s"`
	// Codec is how blocks are encoded; default raw.
	Codec kvcache.Codec `json:"-"`
}

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	set := func(n *int, to int) {
		if *n == 0 {
			*n = to
		}
	}
	set(&c.Context, 8192)
	set(&c.Output, max(1, c.Context/4))
	set(&c.Streams, 64)
	set(&c.RF, 2)
	for f, to := range map[*float64]float64{&c.Decode: 40, &c.Prefill: 8000, &c.Link: 1.25e9} {
		if *f == 0 {
			*f = to
		}
	}
	if c.Retention == 0 {
		c.Retention = time.Hour
	}
	return c
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	c = c.withDefaults()
	switch {
	case c.Context < 1 || c.Context > most:
		return fmt.Errorf("context of %d tokens: want 1 to %d", c.Context, most)
	case c.Output < 1 || c.Output > c.Context:
		return fmt.Errorf("%d of %d tokens are generated", c.Output, c.Context)
	case c.Streams < 1 || c.Streams > 1<<20:
		return fmt.Errorf("%d streams: want 1 to %d", c.Streams, 1<<20)
	case c.RF < 1 || c.RF > 16:
		return fmt.Errorf("%d copies: want 1 to 16", c.RF)
	case !(c.Decode > 0 && c.Decode <= 1e9) || !(c.Prefill > 0 && c.Prefill <= 1e9) || !(c.Link > 0 && c.Link <= 1e15):
		return errors.New("a rate is not above 0, or is beyond all bounds")
	case c.Retention < 0 || c.Retention > 10*365*24*time.Hour:
		return fmt.Errorf("retention of %v: want up to ten years", c.Retention)
	case c.Codec > kvcache.CodecInt4:
		return fmt.Errorf("unknown codec %v", c.Codec)
	}
	return nil
}

// bitsOf is how many bits a codec takes of a number that had so many: 8 or 4, and half a bit for
// the scales of groups of 64 numbers. INT4 has wider ones of values, and takes a little less.
func bitsOf(c kvcache.Codec, bits int) float64 {
	switch c {
	case kvcache.CodecInt8:
		return min(8.5, float64(bits))
	case kvcache.CodecInt4:
		return min(4.5, float64(bits))
	}
	return float64(bits)
}

// Plan is what a host needs. Bytes are those of the KV alone: headers of blocks and
// fragments of memory add one or two per cent.
type Plan struct {
	Shape  Shape  `json:"model"`
	Config Config `json:"host"`
	// Codec and Retention are Config's, in words.
	Codec     string `json:"codec"`
	Retention string `json:"retention"`

	// TokenBytes is one more token as the engine has it, and StoredTokenBytes as it is stored.
	TokenBytes       int64   `json:"token_bytes"`
	StoredTokenBytes float64 `json:"stored_token_bytes"`
	// StreamBytes is a stream at its end, as it is stored.
	StreamBytes int64 `json:"stream_bytes"`
	// Memory is for the live streams of this host and the copies of others'.
	Memory int64 `json:"memory_bytes"`
	// NVMe is for all that is computed within the retention, and the copies of others'.
	NVMe int64 `json:"nvme_bytes"`
	// Written is what is written to disk in a second, on average.
	Written float64 `json:"disk_write_bytes_per_s"`
	// DecodeBytes is what all streams decode in a second, as it is stored.
	DecodeBytes float64 `json:"decode_bytes_per_s"`
	// Replication is what goes out to other hosts on average, and ReplicationPeak at most,
	// while the host prefills and decodes as much as it can.
	Replication     float64 `json:"replication_bytes_per_s"`
	ReplicationPeak float64 `json:"replication_peak_bytes_per_s"`
	// BreakEven is the bytes per second from which on a restore is faster than prefill.
	BreakEven float64 `json:"break_even_bytes_per_s"`
	// PrefillTime and RestoreTime are those of a whole stream, over the link.
	PrefillTime float64 `json:"prefill_s"`
	RestoreTime float64 `json:"restore_s"`
}

// Make computes a plan.
func Make(s Shape, c Config) (Plan, error) {
	if err := c.Validate(); err != nil {
		return Plan{}, err
	}
	if err := s.validate(); err != nil {
		return Plan{}, err
	}
	c = c.withDefaults()
	p := Plan{Shape: s, Config: c, Codec: c.Codec.String(), Retention: c.Retention.String(), TokenBytes: s.TokenBytes()}
	if s.Context > 0 && c.Context > s.Context {
		p.Shape.Notes = append(p.Shape.Notes[:len(p.Shape.Notes):len(p.Shape.Notes)], fmt.Sprintf("the model is made for %d tokens, fewer than %d", s.Context, c.Context))
	}
	ratio := bitsOf(c.Codec, s.Bits) / float64(s.Bits)
	p.StoredTokenBytes = float64(p.TokenBytes) * ratio
	stream := float64(s.StreamBytes(c.Context)) * ratio
	p.StreamBytes = int64(stream)
	streams, copies := float64(c.Streams), float64(c.RF)
	p.Memory = int64(streams * stream * copies)
	prefill := float64(c.Context-c.Output) / c.Prefill
	// A window loses tokens again, but each was written.
	whole := p.StoredTokenBytes * float64(c.Context)
	rate := streams * whole / (prefill + float64(c.Output)/c.Decode)
	// The host cannot prefill more than it can.
	peak := p.StoredTokenBytes * (c.Prefill + streams*c.Decode)
	rate = min(rate, peak)
	p.Written = rate * copies
	p.NVMe = max(p.Memory, int64(p.Written*c.Retention.Seconds()))
	p.DecodeBytes = streams * c.Decode * p.StoredTokenBytes
	p.Replication = rate * (copies - 1)
	p.ReplicationPeak = peak * (copies - 1)
	p.BreakEven = c.Prefill * p.StoredTokenBytes
	p.PrefillTime = float64(c.Context) / c.Prefill
	p.RestoreTime = stream / c.Link
	return p, nil
}
