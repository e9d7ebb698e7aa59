package main

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/redistier"
	"github.com/kvmesh/kvmesh/kvcache/s3tier"
	"github.com/kvmesh/kvmesh/kvcache/sealed"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// tierOptions are the flags of `kvmesh kvnode` that name the tiers below its memory.
type tierOptions struct {
	nvme  nvmetier.Config
	redis redistier.Config
	s3    s3tier.Config
	s3URL string
	// keyFile has the keys with which the tiers are encrypted, and keys are those.
	keyFile string
	keys    *sealed.Keys
}

// add adds the flags.
func (o *tierOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.nvme.Dir, "nvme", "", "directory on a disk, this node's own, for what has no room in memory and is to outlive it (default none)")
	f.Int64Var(&o.nvme.Limit, "nvme-limit", 64<<30, "most bytes in --nvme")
	f.StringVar(&o.redis.Redis.URL, "redis", "", "URL of a node of a Redis or Valkey Cluster that keeps KV for all hosts; KV_REDIS_URL takes its place, where it has a password (default none)")
	f.BoolVar(&o.redis.Single, "redis-single", false, "--redis is one server and no cluster")
	f.StringVar(&o.redis.Prefix, "redis-prefix", "kvmesh", "what all keys in --redis begin with; nodes with another share nothing")
	f.Int64Var(&o.redis.Limit, "redis-limit", 64<<30, "most bytes in --redis, of all nodes together")
	f.StringVar(&o.s3URL, "s3", "", "s3://BUCKET/PREFIX that keeps KV for all hosts (default none)")
	f.StringVar(&o.s3.S3.Endpoint, "s3-endpoint", "", "URL of the S3 server (default AWS_ENDPOINT_URL, else Amazon's)")
	f.StringVar(&o.s3.S3.Region, "s3-region", "", "region of the bucket (default AWS_REGION)")
	f.Int64Var(&o.s3.Limit, "s3-limit", 1<<40, "most bytes in --s3")
	f.StringVar(&o.keyFile, "tier-keys", "", "file of tenants' keys, mode 0600, with which all that goes to --nvme, --redis and --s3 is encrypted (default not)")
}

// complete takes from the environment what the flags leave open, and checks both.
func (o *tierOptions) complete(e *env) error {
	if o.redis.Redis.URL != "" { // the variable alone, which others may use, sends nobody's KV anywhere
		o.redis.Redis.URL = cmp.Or(e.getenv("KV_REDIS_URL"), o.redis.Redis.URL)
	}
	if o.s3URL != "" {
		bucket, prefix, ok := policy.SplitS3(o.s3URL)
		if !ok {
			return usagef("--s3 %.80q: want s3://BUCKET or s3://BUCKET/PREFIX", o.s3URL)
		}
		link := e.s3()
		link.Endpoint = cmp.Or(o.s3.S3.Endpoint, link.Endpoint)
		link.Region = cmp.Or(o.s3.S3.Region, link.Region)
		o.s3.S3, o.s3.Bucket, o.s3.Prefix = link, bucket, prefix
		if err := o.s3.Validate(); err != nil {
			return usagef("--s3: %w", err)
		}
	}
	return o.loadKeys()
}

// loadKeys reads the keys, which the tiers then must have been written with.
func (o *tierOptions) loadKeys() (err error) {
	if o.keyFile == "" {
		return nil
	}
	if o.keys, err = sealed.LoadKeys(o.keyFile); err != nil {
		return withHint(err, "docs/kv-tiers.md says how to make such a file")
	}
	o.nvme.Form, o.redis.Form, o.s3.Form = kvcache.Encrypted, kvcache.Encrypted, kvcache.Encrypted
	return nil
}

// seal puts encryption before a tier, where there are keys.
func (o *tierOptions) seal(tier string, s kvcache.Store, registry prometheus.Registerer) (kvcache.Store, error) {
	if o.keys == nil {
		return s, nil
	}
	return sealed.New(sealed.Config{Store: s, Keys: o.keys, Tier: tier, Registry: registry})
}

// errTier wraps what keeps a tier from being opened.
func errTier(flag string, err error) error {
	return withHint(fmt.Errorf("KV tier of --%s: %w", flag, err), "a server may be away, but its address must be one; a directory must be this user's, and of no other node")
}

// tierTime is how long a node waits for a disk before it serves without it.
const tierTime = time.Second

// open opens the tiers that are named and stacks the node's memory on them; nil without an
// error = none is named. Done closes what was opened, also after an error.
func (o *tierOptions) open(e *env, near *arena.Store, others *peerPart, registry prometheus.Registerer) (below *stack.Stack, done func(), err error) {
	var far []stack.Tier
	done = func() {
		if below != nil {
			logClose(e, "stack", below.Close())
		}
		for _, t := range far {
			logClose(e, t.Name, t.Store.Close())
		}
	}
	if c := o.nvme; c.Dir != "" {
		c.Registry, c.Log = registry, e.log
		t, err := stack.Later(func() (kvcache.Store, error) { return nvmetier.Open(c) }, tierTime, func(err error) {
			e.log.Error("KV tier cannot be opened and is left out", "tier", diskTier, "err", err)
		})
		if err != nil {
			return nil, done, errTier("nvme", err)
		}
		if far, err = o.addTier(far, diskTier, t, registry); err != nil {
			return nil, done, err
		}
	}
	if others != nil {
		far = append(far, stack.Tier{Name: peerTier, Store: others.store, Apart: true})
	}
	if c := o.redis; c.Redis.URL != "" {
		c.Registry, c.Log = registry, e.log
		t, err := redistier.Open(c)
		if err != nil {
			return nil, done, errTier("redis", err)
		}
		if far, err = o.addTier(far, "redis", t, registry); err != nil {
			return nil, done, err
		}
	}
	if c := o.s3; o.s3URL != "" {
		c.Registry, c.Log = registry, e.log
		t, err := s3tier.Open(c)
		if err != nil {
			return nil, done, errTier("s3", err)
		}
		if far, err = o.addTier(far, "s3", t, registry); err != nil {
			return nil, done, err
		}
	}
	if len(far) == 0 {
		return nil, done, nil
	}
	below, err = stack.New(stack.Config{Near: near, Far: far, Registry: registry, Log: e.log})
	return below, done, err
}

// addTier adds a tier that was opened, with encryption before it where there are keys.
func (o *tierOptions) addTier(far []stack.Tier, name string, s kvcache.Store, registry prometheus.Registerer) ([]stack.Tier, error) {
	store, err := o.seal(name, s, registry)
	if err != nil {
		return far, err
	}
	return append(far, stack.Tier{Name: name, Store: store}), nil
}

// logClose logs what went wrong at the end of a tier.
func logClose(e *env, tier string, err error) {
	if err != nil {
		e.log.Warn("close a KV tier", "tier", tier, "err", err)
	}
}

// tierArgs are the flags of a node with the tiers of a policy.
func tierArgs(t policy.KVTiers) (args []string) {
	size := func(b policy.Bytes) string { return strconv.FormatInt(int64(b), 10) }
	if d := t.NVMe; d.Dir != "" {
		args = append(args, "--nvme", d.Dir, "--nvme-limit", size(d.Limit))
	}
	if r := t.Redis; r.URL != "" {
		args = append(args, "--redis", r.URL, "--redis-limit", size(r.Limit), "--redis-single="+strconv.FormatBool(r.Single))
		if r.Prefix != "" {
			args = append(args, "--redis-prefix", r.Prefix)
		}
	}
	if s := t.S3; s.URL != "" {
		args = append(args, "--s3", s.URL, "--s3-limit", size(s.Limit))
		if s.Endpoint != "" {
			args = append(args, "--s3-endpoint", s.Endpoint)
		}
		if s.Region != "" {
			args = append(args, "--s3-region", s.Region)
		}
	}
	if t.Keys != "" {
		args = append(args, "--tier-keys", t.Keys)
	}
	return args
}
