package main

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/worker/gpu"
)

// partOptions are the flags of what a worker has beside its engine: the reading of
// GPUs, the self-check, and the registration in Redis.
type partOptions struct {
	gpus      string
	selfCheck time.Duration
	redis     redislink.Config
}

// Values of --gpus beside a list.
const (
	gpusAuto = "auto"
	gpusNone = "none"
)

// add adds the flags.
func (p *partOptions) add(f *pflag.FlagSet) {
	f.StringVar(&p.gpus, "gpus", gpusAuto, "GPUs whose health is the worker's: auto (those of CUDA_VISIBLE_DEVICES, else all), none, or a list of indices and UUIDs")
	f.DurationVar(&p.selfCheck, "self-check", 30*time.Second, "how often an idle engine must generate a token, 0 = never")
	f.StringVar(&p.redis.URL, "redis", "", "URL of a Redis to register in: redis://HOST:PORT, or rediss:// for TLS")
	f.StringVar(&p.redis.TrustedCA, "redis-ca", "", "PEM file of the authorities of a rediss:// server (default the system's)")
}

// apply opens what the flags ask for; the caller calls done after the worker's end.
func (p partOptions) apply(ctx context.Context, e *env, o *workerOptions) (done func(), err error) {
	o.SelfCheck = p.selfCheck
	if p.selfCheck == 0 {
		o.SelfCheck = -1
	}
	if p.redis.URL != "" {
		if o.Redis, err = redislink.Open(p.redis); err != nil {
			return nil, usagef("--redis or REDIS_URL: %w", err)
		}
		o.Log.Info("registers in Redis", "url", p.redis.Shown())
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var reading sync.WaitGroup
	probe, err := p.openGPUs(e, o)
	if err != nil {
		cancel()
		return nil, err
	}
	if probe != nil {
		o.GPU = probe
		reading.Go(func() { probe.Run(ctx) })
	}
	return func() {
		cancel()
		reading.Wait()
		if o.Redis != nil {
			_ = o.Redis.Close() // its connections are all that is left of it
		}
	}, nil
}

// openGPUs returns no probe where there is nothing to read, which only an explicit
// list makes an error.
func (p partOptions) openGPUs(e *env, o *workerOptions) (*gpu.Probe, error) {
	cfg := gpu.Config{Log: o.Log}
	switch p.gpus {
	case gpusNone:
		return nil, nil
	case gpusAuto:
		if o.engine == policy.EngineSim {
			return nil, nil
		}
		visible, hidden := visibleDevices(e.getenv("CUDA_VISIBLE_DEVICES"))
		if hidden {
			return nil, nil
		}
		cfg.Devices = visible
	default:
		cfg.Devices = strings.Split(p.gpus, ",")
	}
	probe, err := gpu.Open(cfg)
	switch {
	case err == nil:
		o.Log.Info("reads GPUs", "count", len(probe.Devices()))
		return probe, nil
	case p.gpus != gpusAuto:
		return nil, withHint(err, "--gpus none runs without reading any")
	case errors.Is(err, gpu.ErrAbsent):
		o.Log.Debug("no GPU to read", "err", err)
	default:
		o.Log.Warn("GPUs are not read", "err", err)
	}
	return nil, nil
}

// visibleDevices reads CUDA's list. An entry that CUDA does not know ends it, and so
// hides the rest; an empty list is none given.
func visibleDevices(list string) (devices []string, hidden bool) {
	if list == "" {
		return nil, false
	}
	for d := range strings.SplitSeq(list, ",") {
		d = strings.TrimSpace(d)
		if d == "" || strings.HasPrefix(d, "-") || strings.EqualFold(d, "NoDevFiles") || d == "void" {
			break
		}
		devices = append(devices, d)
	}
	return devices, len(devices) == 0
}
