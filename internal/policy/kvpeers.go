package policy

import (
	"cmp"
	"net"
)

// kvPeers checks how copies are exchanged. The node itself checks the nodes' names.
func (p *parser) kvPeers(m *Mesh) {
	k, at := &m.KV, m.At
	c := &k.Peers
	c.Zone = cmp.Or(c.Zone, m.Zone)
	c.Replicas = cmp.Or(c.Replicas, 2)
	if c.Listen == "" {
		if p.given(at, "kv.peers") {
			p.wrong(at, "kv.peers", "kv.peers: kv.peers.listen is missing")
		}
		return
	}
	host, _, err := net.SplitHostPort(c.Listen)
	switch tls := c.Cert != "" || c.Key != "" || c.CA != ""; {
	case err != nil || net.ParseIP(host) == nil:
		p.wrong(at, "kv.peers.listen", "kv.peers.listen %.80q: want IP:PORT", c.Listen)
	case tls && (c.Cert == "" || c.Key == "" || c.CA == ""):
		p.wrong(at, "kv.peers", "kv.peers: cert, key and ca belong together")
	case !tls && !net.ParseIP(host).IsLoopback():
		p.wrong(at, "kv.peers.listen", "kv.peers.listen %.80q: want a loopback address, or cert, key and ca", c.Listen)
	case !k.Node || k.Dir == KVOff:
		p.wrong(at, "kv.peers.listen", "kv.peers needs a KV node: kv.node true, and kv.dir not off")
	case len(c.Nodes) == 0 && m.Registry.Redis == "":
		p.wrong(at, "kv.peers", "kv.peers: give kv.peers.nodes, or registry.redis, by which nodes find each other")
	case c.Replicas < 2:
		p.wrong(at, "kv.peers.replicas", "kv.peers.replicas %d: want 2 or more", c.Replicas)
	}
}
