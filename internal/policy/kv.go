package policy

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// KV says where the local workers of `kvmesh up` keep the KV of their streams, so that
// each can go on with those of another.
type KV struct {
	// Dir is the folder below which a private one is made for each run; default
	// /dev/shm, or the folder for temporary files where that is small. KVOff keeps none.
	Dir   string `yaml:"dir"`
	Limit Bytes  `yaml:"limit"` // most bytes of all workers together, default 4Gi; in /dev/shm at most half of what is free
	// Node has a process of its own, which `kvmesh up` starts, keep the KV in one piece of
	// memory, all of which is taken at the start. False is a directory that the workers share.
	Node bool `yaml:"node"`
	// Tiers are below that memory; they outlive it. They need Node.
	Tiers KVTiers `yaml:"tiers"`
	// Peers are the KV nodes of other hosts, which have copies. They need Node.
	Peers KVPeers `yaml:"peers"`
	// LMCache lets vLLM on this host keep its KV in that memory. It needs Node, and Dir below
	// /dev/shm or not given.
	LMCache KVLMCache `yaml:"lmcache"`
	// Events are the publishers that the gateway follows to know which worker holds the
	// beginning of a prompt; default none. They need no Node: vLLM has a publisher itself.
	Events []KVEvents `yaml:"events"`
}

// KVEvents is one publisher of KV events, of a KV node or of vLLM.
type KVEvents struct {
	Address string `yaml:"address"` // tcp://HOST:PORT or ipc://PATH
	Replay  string `yaml:"replay"`  // where it tells again what was missed; default nowhere
	Topic   string `yaml:"topic"`   // what topics begin with that are followed; default all
	// Workers are the ids of those that find there what it tells of: those of the pools, and of
	// workers that register.
	Workers []string `yaml:"workers"`
}

// KVLMCache is where vLLM's connector of LMCache finds a KV node.
type KVLMCache struct {
	Listen string `yaml:"listen"` // a loopback address, host:port; "" is nowhere
	Chunk  int    `yaml:"chunk"`  // tokens of a chunk, a multiple of vLLM's block size; default 256
}

// KVPeers says how a KV node exchanges copies with those of other hosts: blocks, and the open
// ends of streams, so that a worker there can go on with the streams of a host that is lost.
// Who holds the authority's key of CA can read prompts, so it is one for KV nodes alone.
type KVPeers struct {
	Listen    string   `yaml:"listen"`    // IP:PORT for the others; "" is nowhere, and then there are no copies
	Address   string   `yaml:"address"`   // by which they reach it, default Listen
	ID        string   `yaml:"id"`        // default the host's name
	Zone      string   `yaml:"zone"`      // copies go to another one first; default the mesh's
	Nodes     []string `yaml:"nodes"`     // all nodes, ID=ZONE@HOST:PORT; default: those in the registry's Redis
	Replicas  int      `yaml:"replicas"`  // hosts that are to have each block, default 2
	Bandwidth Bytes    `yaml:"bandwidth"` // most bytes a second that go to others; default no bound
	// Cert, Key and CA are PEM files for TLS between the nodes, without which Listen is a
	// loopback address.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

// KVTiers are the tiers below the memory of a KV node, in the order in which it asks them.
// What is not given is not there.
type KVTiers struct {
	NVMe  KVDisk  `yaml:"nvme"`
	Redis KVRedis `yaml:"redis"`
	S3    KVS3    `yaml:"s3"`
	// Keys is a file of tenants' keys, with which what goes to the tiers is encrypted;
	// default none.
	Keys string `yaml:"keys"`
}

// KVDisk is a directory of a local disk.
type KVDisk struct {
	Dir   string `yaml:"dir"`   // the node's own; made if it is not there
	Limit Bytes  `yaml:"limit"` // default 64Gi
}

// KVRedis is a Redis or Valkey Cluster, or one server.
type KVRedis struct {
	// URL names a node of the cluster. KV_REDIS_URL in the environment takes its place, so
	// that no password stands here, where it is refused.
	URL    string `yaml:"url"`
	Single bool   `yaml:"single"` // one server and no cluster
	Prefix string `yaml:"prefix"` // begins all keys, default kvmesh
	Limit  Bytes  `yaml:"limit"`  // default 64Gi
}

// KVS3 is a bucket. Who asks stands in the environment, in the variables of Amazon's own
// tools, and where, if it is not said here.
type KVS3 struct {
	URL      string `yaml:"url"`      // s3://BUCKET or s3://BUCKET/PREFIX
	Endpoint string `yaml:"endpoint"` // the server's URL; default Amazon's
	Region   string `yaml:"region"`
	Limit    Bytes  `yaml:"limit"` // default 1Ti
}

// LeastKV is the smallest KV.Limit, in bytes: a few blocks.
const LeastKV = 1 << 20

// sharedMemory is where engines of the same host open memory by its name.
const sharedMemory = "/dev/shm"

// KVOff is the KV.Dir of workers that keep no KV.
const KVOff = "off"

// kv checks where KV is kept.
func (p *parser) kv(k *KV, at Place) {
	k.Limit = cmp.Or(k.Limit, 4<<30)
	t := &k.Tiers
	t.NVMe.Limit = cmp.Or(t.NVMe.Limit, 64<<30)
	t.Redis.Limit = cmp.Or(t.Redis.Limit, 64<<30)
	t.S3.Limit = cmp.Or(t.S3.Limit, 1<<40)
	for path, limit := range map[string]Bytes{
		"kv.limit": k.Limit, "kv.tiers.nvme.limit": t.NVMe.Limit, "kv.tiers.redis.limit": t.Redis.Limit, "kv.tiers.s3.limit": t.S3.Limit,
	} {
		if limit < LeastKV {
			p.wrong(at, path, "%s %v: want at least %v", path, limit, Bytes(LeastKV))
		}
	}
	for path, value := range map[string]string{"kv.tiers.nvme.dir": t.NVMe.Dir, "kv.tiers.redis.url": t.Redis.URL, "kv.tiers.s3.url": t.S3.URL} {
		tier := path[:strings.LastIndexByte(path, '.')]
		if value == "" && p.given(at, tier) {
			p.wrong(at, tier, "%s: %s is missing", tier, path)
		}
		if value != "" && (!k.Node || k.Dir == KVOff) {
			p.wrong(at, path, "%s needs a KV node: kv.node true, and kv.dir not off", tier)
		}
	}
	if t.Keys != "" && t.NVMe.Dir == "" && t.Redis.URL == "" && t.S3.URL == "" {
		p.wrong(at, "kv.tiers.keys", "kv.tiers.keys: there is no tier that they are for")
	}
	p.kvLMCache(k, at)
	p.kvEvents(k.Events, at)
	if t.Redis.URL != "" {
		p.kvRedis(t.Redis, at)
	}
	if t.S3.URL != "" {
		if _, _, ok := SplitS3(t.S3.URL); !ok {
			p.wrong(at, "kv.tiers.s3.url", "kv.tiers.s3.url %.80q: want s3://BUCKET or s3://BUCKET/PREFIX", t.S3.URL)
		}
		if u, err := url.Parse(t.S3.Endpoint); t.S3.Endpoint != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
			p.wrong(at, "kv.tiers.s3.endpoint", "kv.tiers.s3.endpoint: want http(s)://HOST:PORT")
		}
	}
}

// kvLMCache checks where vLLM finds the node.
func (p *parser) kvLMCache(k *KV, at Place) {
	l := &k.LMCache
	l.Chunk = cmp.Or(l.Chunk, 256)
	switch host, _, err := net.SplitHostPort(l.Listen); {
	case l.Chunk < 1 || l.Chunk > 65536:
		p.wrong(at, "kv.lmcache.chunk", "kv.lmcache.chunk %d: want 1 to 65536", l.Chunk)
	case l.Listen == "" && p.given(at, "kv.lmcache"):
		p.wrong(at, "kv.lmcache", "kv.lmcache: kv.lmcache.listen is missing")
	case l.Listen == "":
	case err != nil || !net.ParseIP(host).IsLoopback():
		p.wrong(at, "kv.lmcache.listen", "kv.lmcache.listen %.80q: want a loopback address, IP:PORT", l.Listen)
	case !k.Node || k.Dir == KVOff:
		p.wrong(at, "kv.lmcache.listen", "kv.lmcache needs a KV node: kv.node true, and kv.dir not off")
	case k.Dir != "" && !strings.HasPrefix(filepath.Clean(k.Dir)+"/", sharedMemory+"/"):
		p.wrong(at, "kv.dir", "kv.dir %.80q: kv.lmcache needs one below %s, where engines open the memory", k.Dir, sharedMemory)
	}
}

// mostEvents bounds the publishers that a gateway follows.
const mostEvents = 1024

// kvEvents checks whom the gateway follows.
func (p *parser) kvEvents(all []KVEvents, at Place) {
	if len(all) > mostEvents {
		p.wrong(at, "kv.events", "kv.events: %d publishers, at most %d", len(all), mostEvents)
		return
	}
	seen := map[string]bool{}
	for i, e := range all {
		path := fmt.Sprintf("kv.events[%d]", i)
		for name, address := range map[string]string{".address": e.Address, ".replay": e.Replay} {
			if (name == ".address" || address != "") && !eventAddress(address) {
				p.wrong(at, path+name, "%s%s %.80q: want tcp://HOST:PORT or ipc://PATH", path, name, address)
			}
		}
		if seen[e.Address] {
			p.wrong(at, path+".address", "%s.address %.80q stands twice", path, e.Address)
		}
		seen[e.Address] = true
		if len(e.Workers) == 0 {
			p.wrong(at, path, "%s: %s.workers are missing", path, path)
		}
		for j, id := range e.Workers {
			// A listed server's id has its port.
			if id == "" || len(id) > mostID || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r == '/' || r > '~' }) {
				field := fmt.Sprintf("%s.workers[%d]", path, j)
				p.wrong(at, field, "%s %.80q: want the id of a worker", field, id)
			}
		}
	}
}

// eventAddress says whether it is an address of ZeroMQ that one can connect to.
func eventAddress(s string) bool {
	if path, ok := strings.CutPrefix(s, "ipc://"); ok {
		return path != ""
	}
	at, ok := strings.CutPrefix(s, "tcp://")
	host, port, err := net.SplitHostPort(at)
	n, bad := strconv.ParseUint(port, 10, 16)
	return ok && err == nil && host != "" && host != "*" && bad == nil && n > 0
}

// kvRedis checks where Redis is.
func (p *parser) kvRedis(r KVRedis, at Place) {
	const path = "kv.tiers.redis.url"
	// No message repeats the URL, which may hold a password.
	u, err := url.Parse(r.URL)
	switch {
	case err != nil || u.Host == "" || !slices.Contains([]string{"redis", "rediss", "redis+sentinel", "rediss+sentinel"}, u.Scheme):
		p.wrong(at, path, "%s: want redis://HOST:PORT, rediss://HOST:PORT for TLS, or redis+sentinel://HOST:PORT/MASTER", path)
	case strings.HasSuffix(u.Scheme, "+sentinel") && !r.Single:
		p.wrong(at, path, "%s: Sentinels watch one server, not a cluster: set kv.tiers.redis.single", path)
	case u.Query().Has("sentinel_password"):
		p.wrong(at, path, "%s holds a password: give the URL in KV_REDIS_URL, where nobody reads it", path)
	case u.User != nil && hasPassword(u.User):
		p.wrong(at, path, "%s holds a password: give the URL in KV_REDIS_URL, where nobody reads it", path)
	}
}

// hasPassword says whether a password stands in a URL.
func hasPassword(u *url.Userinfo) bool {
	_, ok := u.Password()
	return ok
}

// SplitS3 reads s3://BUCKET or s3://BUCKET/PREFIX; false = it is none of them.
func SplitS3(s string) (bucket, prefix string, ok bool) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "s3" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", "", false
	}
	return u.Host, strings.Trim(u.Path, "/"), true
}
