package main

import (
	"cmp"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// peerOptions are the flags of `kvmesh kvnode` that have it keep copies on other hosts.
type peerOptions struct {
	// listen is where others find this node; "" has it know no others.
	listen string
	// id and zone are this node's, and address is what others connect to.
	id, zone, address string
	// nodes are all members, and registry is where they are found; one of them is given.
	nodes    []string
	registry string
	// replicas counts the hosts of a block, this one included.
	replicas int
	// interval is how many tokens of a tail are copied at once, as a rule.
	interval int
	// bandwidth is as it was given; bytes is what it means.
	bandwidth string
	identity  kvrpc.Identity

	// book is the file with what other nodes are still to forget.
	book string

	// Set by complete.
	self  placement.Member
	list  []placement.Member
	bytes int64 // a second, 0 = no bound
}

// add adds the flags.
func (o *peerOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "peer-listen", "", "ip:port for the KV nodes of other hosts, with which this one then exchanges copies; without --peer-tls-cert a loopback address (default none)")
	f.StringVar(&o.id, "id", "", "name of this node among those of other hosts (default the host's name)")
	f.StringVar(&o.zone, "zone", "", "zone of this node; copies go to another one first")
	f.StringVar(&o.address, "peer-address", "", "host:port by which other nodes reach --peer-listen (default --peer-listen)")
	f.StringSliceVar(&o.nodes, "peers", nil, "all KV nodes, as ID=ZONE@HOST:PORT or ID=HOST:PORT, separated by commas; this one may be among them")
	f.StringVar(&o.registry, "registry-redis", "", "URL of the Redis in which KV nodes find each other, instead of --peers; REDIS_URL takes its place, where it has a password (default none)")
	f.IntVar(&o.replicas, "replicas", 2, "hosts that are to have each block, this one included")
	f.StringVar(&o.bandwidth, "replicate-bandwidth", "", "most bytes a second that are written to other hosts, such as 1Gi/s (default no bound)")
	f.IntVar(&o.interval, "replicate-interval", 16, "tokens after which the open end of a stream is copied to another host; CHECKPOINT_INTERVAL where it is not given")
	f.StringVar(&o.identity.CertFile, "peer-tls-cert", "", "PEM file with this node's certificate, for both sides of TLS between KV nodes")
	f.StringVar(&o.identity.KeyFile, "peer-tls-key", "", "PEM file with its key")
	f.StringVar(&o.identity.CAFile, "peer-tls-ca", "", "PEM file with the authority of all KV nodes; a node without a certificate of it is refused")
}

// complete checks the flags, and takes from the environment what they leave open.
func (o *peerOptions) complete(e *env, f *pflag.FlagSet) error {
	if o.listen == "" {
		for _, name := range []string{"peers", "registry-redis", "peer-address", "peer-tls-cert", "peer-tls-key", "peer-tls-ca"} {
			if f.Changed(name) {
				return usagef("--%s: give --peer-listen too", name)
			}
		}
		return nil
	}
	if n := e.getenv("CHECKPOINT_INTERVAL"); n != "" && !f.Changed("replicate-interval") {
		var err error
		if o.interval, err = strconv.Atoi(n); err != nil {
			return usagef("CHECKPOINT_INTERVAL %.40q: want a number of tokens", n)
		}
	}
	switch {
	case (len(o.nodes) > 0) == (o.registry != ""):
		return usagef("--peer-listen: give one of --peers and --registry-redis, by which nodes find each other")
	case o.replicas < 2:
		return usagef("--replicas %d: want 2 or more", o.replicas)
	case o.interval < 1:
		return usagef("--replicate-interval %d: want 1 or more", o.interval)
	}
	if err := o.completeSelf(); err != nil {
		return err
	}
	if o.bandwidth != "" {
		b, err := policy.ParseBytes(strings.TrimSuffix(o.bandwidth, "/s"))
		if err != nil {
			return usagef("--replicate-bandwidth: %w", err)
		}
		o.bytes = int64(b)
	}
	if o.registry != "" {
		o.registry = cmp.Or(e.getenv("REDIS_URL"), o.registry)
		if err := (redislink.Config{URL: o.registry}).Validate(); err != nil {
			return usagef("--registry-redis: %w", err)
		}
	}
	return nil
}

// completeSelf finds out who this node is, and who the others are.
func (o *peerOptions) completeSelf() error {
	if o.id == "" {
		host, err := os.Hostname()
		if err != nil {
			return usagef("--id is missing, and the host's name is not known: %w", err)
		}
		o.id = host
	}
	o.self = placement.Member{ID: o.id, Zone: o.zone, Addr: cmp.Or(o.address, o.listen)}
	for _, text := range o.nodes {
		m, err := placement.Parse(text)
		if err != nil {
			return usagef("--peers: %w", err)
		}
		if m.ID == o.id {
			o.self = placement.Member{ID: m.ID, Zone: cmp.Or(o.zone, m.Zone), Addr: m.Addr}
			m = o.self
		}
		o.list = append(o.list, m)
	}
	if err := o.self.Validate(); err != nil {
		return usagef("--id, --zone, --peer-address: %w", err)
	}
	if host, _, err := net.SplitHostPort(o.self.Addr); err == nil && net.ParseIP(host).IsUnspecified() && o.registry != "" {
		return usagef("--peer-listen %s: give --peer-address, by which other hosts reach it", o.listen)
	}
	return nil
}

// peerArgs are the flags of a node with the peers of a policy.
func peerArgs(k policy.KVPeers, redisURL string) (args []string) {
	if k.Listen == "" {
		return nil
	}
	args = []string{"--peer-listen", k.Listen, "--replicas", strconv.Itoa(k.Replicas)}
	for _, f := range [][2]string{
		{"--id", k.ID},
		{"--zone", k.Zone},
		{"--peer-address", k.Address},
		{"--peers", strings.Join(k.Nodes, ",")},
		{"--peer-tls-cert", k.Cert},
		{"--peer-tls-key", k.Key},
		{"--peer-tls-ca", k.CA},
	} {
		if f[1] != "" {
			args = append(args, f[:]...)
		}
	}
	if k.Bandwidth > 0 {
		args = append(args, "--replicate-bandwidth", strconv.FormatInt(int64(k.Bandwidth), 10))
	}
	if len(k.Nodes) == 0 {
		args = append(args, "--registry-redis", redisURL)
	}
	return args
}
