package policy

import (
	"strings"
	"testing"
)

// kvMesh is a pool and a Mesh with a line of KV settings, the file's line 12.
func kvMesh(kv string) string {
	return pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec:\n  " + kv + "\n"
}

func TestKVTiers(t *testing.T) {
	s := parse(t, kvMesh("kv: {node: true, tiers: {nvme: {dir: /d}, redis: {url: 'redis://h:1', single: true}, s3: {url: 's3://b/p', limit: 5Gi}}}"))
	k := s.Mesh.KV
	if k.Limit != 4<<30 || k.Tiers.NVMe.Dir != "/d" || k.Tiers.NVMe.Limit != 64<<30 || !k.Tiers.Redis.Single || k.Tiers.S3.Limit != 5<<30 {
		t.Errorf("%+v", k)
	}
	for _, dir := range []string{"/dev/shm", "/dev/shm/", "/dev/shm/mine"} {
		if k := parse(t, kvMesh("kv: {node: true, dir: "+dir+", lmcache: {listen: '127.0.0.1:1'}}")).Mesh.KV; k.LMCache.Chunk != 256 {
			t.Errorf("%+v", k)
		}
	}
	e := parse(t, kvMesh("kv: {events: [{address: 'tcp://[::1]:5557', replay: 'ipc:///r', topic: 'kv@', workers: [w-1, '10.0.0.1:8000']}]}")).Mesh.KV.Events
	if len(e) != 1 || e[0].Address != "tcp://[::1]:5557" || e[0].Replay != "ipc:///r" || e[0].Topic != "kv@" || len(e[0].Workers) != 2 {
		t.Errorf("%+v", e)
	}
	if k := parse(t, pool).Mesh.KV; k.Tiers.NVMe.Dir != "" || k.Tiers.Redis.URL != "" || k.Tiers.S3.URL != "" {
		t.Errorf("%+v", k)
	}
}

// Mistakes name the line, and never repeat a password.
func TestKVMistakes(t *testing.T) {
	for kv, want := range map[string]string{
		"kv: {limit: 1Ki}": "p.yaml:12: kv.limit 1Ki: want at least 1Mi",
		"kv: {node: true, tiers: {nvme: {dir: /d, limit: 5}}}":                                                         "p.yaml:12: kv.tiers.nvme.limit 5: want at least 1Mi",
		"kv: {node: true, tiers: {nvme: {limit: 5Gi}}}":                                                                "p.yaml:12: kv.tiers.nvme: kv.tiers.nvme.dir is missing",
		"kv: {node: true, tiers: {nvm: {dir: /d}}}":                                                                    `p.yaml:12: unknown field "kv.tiers.nvm" (did you mean "nvme"?)`,
		"kv: {node: true, tiers: {keys: /k}}":                                                                          "p.yaml:12: kv.tiers.keys: there is no tier",
		"kv: {tiers: {nvme: {dir: /d}}}":                                                                               "p.yaml:12: kv.tiers.nvme needs a KV node",
		"kv: {node: true, dir: off, tiers: {nvme: {dir: /d}}}":                                                         "p.yaml:12: kv.tiers.nvme needs a KV node",
		"kv: {node: true, tiers: {redis: {url: 'h:1'}}}":                                                               "p.yaml:12: kv.tiers.redis.url: want redis://HOST:PORT",
		"kv: {node: true, tiers: {redis: {url: 'redis://u:hunter2@h:1'}}}":                                             "p.yaml:12: kv.tiers.redis.url holds a password: give the URL in KV_REDIS_URL",
		"kv: {node: true, tiers: {redis: {url: 'redis+sentinel://h:1/m'}}}":                                            "p.yaml:12: kv.tiers.redis.url: Sentinels watch one server",
		"kv: {node: true, tiers: {redis: {single: true, url: 'redis+sentinel://h:1/m?sentinel_password=hunter2'}}}":    "p.yaml:12: kv.tiers.redis.url holds a password",
		"kv: {node: true, tiers: {s3: {url: 'http://b'}}}":                                                             `p.yaml:12: kv.tiers.s3.url "http://b": want s3://BUCKET`,
		"kv: {node: true, tiers: {s3: {url: 's3://b', endpoint: 'h:1'}}}":                                              "p.yaml:12: kv.tiers.s3.endpoint: want http(s)://HOST:PORT",
		"kv: {node: true, tiers: {s3: {url: 's3://b', limit: many}}}":                                                  `p.yaml:12: "many" is no size`,
		"kv: {node: true, tiers: {redis: {url: 'redis://h:1', single: maybe}}}":                                        "p.yaml:12:",
		"kv: {lmcache: {listen: '127.0.0.1:1'}}":                                                                       "p.yaml:12: kv.lmcache needs a KV node",
		"kv: {node: true, lmcache: {chunk: 128}}":                                                                      "p.yaml:12: kv.lmcache: kv.lmcache.listen is missing",
		"kv: {node: true, lmcache: {listen: '0.0.0.0:1'}}":                                                             `p.yaml:12: kv.lmcache.listen "0.0.0.0:1": want a loopback address`,
		"kv: {node: true, dir: /var/kv, lmcache: {listen: '127.0.0.1:1'}}":                                             `p.yaml:12: kv.dir "/var/kv": kv.lmcache needs one below /dev/shm`,
		"kv: {node: true, dir: /dev/shm2, lmcache: {listen: '127.0.0.1:1'}}":                                           `p.yaml:12: kv.dir "/dev/shm2": kv.lmcache needs`,
		"kv: {node: true, dir: /dev/shm/.., lmcache: {listen: '127.0.0.1:1'}}":                                         `p.yaml:12: kv.dir "/dev/shm/..": kv.lmcache needs`,
		"kv: {node: true, lmcache: {listen: '127.0.0.1:1', chunk: -1}}":                                                "p.yaml:12: kv.lmcache.chunk -1: want 1 to 65536",
		"kv: {events: [{address: 'h:1', workers: [w]}]}":                                                               `p.yaml:12: kv.events[0].address "h:1": want tcp://HOST:PORT or ipc://PATH`,
		"kv: {events: [{address: 'tcp://*:1', workers: [w]}]}":                                                         `p.yaml:12: kv.events[0].address "tcp://*:1": want`,
		"kv: {events: [{address: 'tcp://h:0', workers: [w]}]}":                                                         `p.yaml:12: kv.events[0].address "tcp://h:0": want`,
		"kv: {events: [{addres: 'tcp://h:1', workers: [w]}]}":                                                          `p.yaml:12: unknown field "kv.events[0].addres" (did you mean "address"?)`,
		"kv: {events: [{address: 'tcp://h:1', replay: 'ipc://', workers: [w]}]}":                                       `p.yaml:12: kv.events[0].replay "ipc://": want`,
		"kv:\n    events:\n      - {address: 'tcp://h:1', workers: [w]}\n      - {address: 'tcp://h:1', workers: [w]}": `p.yaml:15: kv.events[1].address "tcp://h:1" stands twice`,
		"kv:\n    events:\n      - {address: 'tcp://h:1', workers: [w]}\n      - address: 'tcp://h:2'":                 `p.yaml:15: kv.events[1]: kv.events[1].workers are missing`,
		"kv:\n    events:\n      - address: 'tcp://h:1'\n        workers:\n        - w\n        - 'a b'":               `p.yaml:17: kv.events[0].workers[1] "a b": want the id of a worker`,
		"kv: {peers: {listen: '127.0.0.1:1', nodes: [a=h:1]}}":                                                         "p.yaml:12: kv.peers needs a KV node",
		"kv: {node: true, peers: {nodes: [a=h:1]}}":                                                                    "p.yaml:12: kv.peers: kv.peers.listen is missing",
		"kv: {node: true, peers: {listen: 'h:1', nodes: [a=h:1]}}":                                                     `p.yaml:12: kv.peers.listen "h:1": want IP:PORT`,
		"kv: {node: true, peers: {listen: '10.0.0.1:1', nodes: [a=h:1]}}":                                              `p.yaml:12: kv.peers.listen "10.0.0.1:1": want a loopback address, or cert`,
		"kv: {node: true, peers: {listen: '10.0.0.1:1', nodes: [a=h:1], cert: c}}":                                     "p.yaml:12: kv.peers: cert, key and ca belong together",
		"kv: {node: true, peers: {listen: '127.0.0.1:1'}}":                                                             "p.yaml:12: kv.peers: give kv.peers.nodes, or registry.redis",
		"kv: {node: true, peers: {listen: '127.0.0.1:1', nodes: [a=h:1], replicas: 1}}":                                "p.yaml:12: kv.peers.replicas 1: want 2 or more",
	} {
		_, err := Parse(File{Name: "p.yaml", Data: []byte(kvMesh(kv))})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s:\n%v\nwant %s", kv, err, want)
		}
	}
}

func TestSplitS3(t *testing.T) {
	for in, want := range map[string]string{"s3://b": "b ", "s3://b/": "b ", "s3://b/p/q/": "b p/q"} {
		if b, p, ok := SplitS3(in); !ok || b+" "+p != want {
			t.Errorf("%s: %s %s %v", in, b, p, ok)
		}
	}
	for _, bad := range []string{"", "b", "s3:b", "s3://", "s3://u@b", "s3://b?x", "http://b"} {
		if _, _, ok := SplitS3(bad); ok {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestKVPeers: defaults of the nodes of other hosts.
func TestKVPeers(t *testing.T) {
	k := parse(t, kvMesh("kv: {node: true, peers: {listen: '10.0.0.1:9096', nodes: [a=z@10.0.0.1:9096], bandwidth: 1Gi, cert: c, key: k, ca: a}}")).Mesh.KV.Peers
	if k.Replicas != 2 || k.Bandwidth != 1<<30 || len(k.Nodes) != 1 || k.CA != "a" {
		t.Errorf("%+v", k)
	}
}
