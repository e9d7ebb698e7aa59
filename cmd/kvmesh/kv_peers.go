package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

func kvPeersCommand(o *kvStore) *cobra.Command {
	return &cobra.Command{
		Use:   "peers",
		Short: "List the KV nodes of other hosts, and what is on none of them yet",
		Long: `Peers asks the KV node of this host who keeps copies for it: how the node reaches
them, how full their memory is, and what it has put there since its start. What is on no
second host is lost if this host is lost now; blocks that were given up, because a host
had no room or a queue was full, do not wait any more.`,
		Example: "  kvmesh kv peers\n  kvmesh kv peers --kv-dir /dev/shm/kvnode -o json | jq .not_on_a_second_host.tokens",
		RunE: func(c *cobra.Command, _ []string) error {
			js, err := o.find()
			if err != nil {
				return err
			}
			if !isKVNode(o.dir) {
				return withHint(errors.New(o.dir+" is no KV node's directory"), "only a KV node keeps copies on other hosts: see docs/kv-peers.md")
			}
			node, err := kvnode.Open(o.dir)
			if err != nil {
				return err
			}
			defer node.Close()
			p, err := node.Peers(c.Context())
			if err != nil {
				return withHint(err, "`kvmesh kvnode` has --peer-listen with --peers or --registry-redis for that, and a policy kv.peers")
			}
			if js {
				return writeJSON(o.e.stdout, p)
			}
			return printPeers(o.e.stdout, p, time.Now())
		},
	}
}

// printPeers prints what a node knows for people.
func printPeers(w io.Writer, p kvnode.Peers, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tZONE\tADDRESS\tSTATE\tANSWERED\tUSED\tOF BYTES\tCOPIED BLOCKS\tBYTES\tTO FORGET")
	for _, n := range p.Nodes {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\n", n.ID, dash(n.Zone), dash(n.Address), n.State, ago(n.Answered, now), n.Used, n.Limit, n.Copied, n.CopiedBytes, n.Owed)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range p.Nodes {
		if n.Trouble != "" {
			fmt.Fprintf(w, "%s: %s\n", n.ID, n.Trouble)
		}
	}
	zone := ""
	if p.Zone != "" {
		zone = " in zone " + p.Zone
	}
	b := p.Behind
	_, err := fmt.Fprintf(w, "this node is %s%s; each block is to be on %d hosts\nnot on a second host: %d tokens, of them %d blocks of %d bytes that wait; %d blocks given up since the start\n",
		p.ID, zone, p.Replicas, b.Tokens, b.Blocks, b.Bytes, b.GivenUp)
	return err
}

// ago is how long before now something was, for people.
func ago(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return max(now.Sub(t), 0).Round(time.Second).String() + " ago"
}

// view is what the commands show.
func (p *peerPart) view() kvnode.Peers {
	late := p.below.BehindIn(peerTier)
	v := kvnode.Peers{ID: p.o.self.ID, Zone: p.o.self.Zone, Replicas: p.o.replicas, Nodes: []kvnode.PeerNode{}}
	v.Behind = kvnode.PeerBehind{Tokens: p.unreplicated(), Blocks: late.Blocks, Bytes: late.Bytes, GivenUp: late.GivenUp}
	stats := p.store.Stats()
	for _, st := range p.store.States() {
		n, of := kvnode.PeerNode{ID: st.ID, Zone: st.Zone, Address: st.Addr, State: "up", Trouble: st.Trouble, Answered: st.Answered, Owed: st.Owed}, stats[st.ID]
		switch {
		case st.Gone:
			n.State = "left"
		case st.Trouble != "" || st.Away:
			n.State = "failing"
		}
		n.Used, n.Limit, n.Copied, n.CopiedBytes = of.Used, of.Limit, of.Puts, of.PutBytes
		v.Nodes = append(v.Nodes, n)
	}
	return v
}
