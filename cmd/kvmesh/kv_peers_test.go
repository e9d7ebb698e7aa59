package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

// TestPrintPeers: the table of other hosts, and what is on none of them.
func TestPrintPeers(t *testing.T) {
	var out strings.Builder
	now := time.Now()
	err := printPeers(&out, kvnode.Peers{
		ID: "a", Zone: "east", Replicas: 2, Behind: kvnode.PeerBehind{Tokens: 70, Blocks: 1, Bytes: 5, GivenUp: 2},
		Nodes: []kvnode.PeerNode{
			{ID: "b", Zone: "west", Address: "h:1", State: "up", Answered: now.Add(-3 * time.Second), Used: 3, Limit: 8, Copied: 4, CopiedBytes: 9},
			{ID: "c", State: "failing", Trouble: "connection refused", Owed: 1},
		},
	}, now)
	want := `NODE  ZONE  ADDRESS  STATE    ANSWERED  USED  OF BYTES  COPIED BLOCKS  BYTES  TO FORGET
b     west  h:1      up       3s ago    3     8         4              9      0
c     -     -        failing  -         0     0         0              0      1
c: connection refused
this node is a in zone east; each block is to be on 2 hosts
not on a second host: 70 tokens, of them 1 blocks of 5 bytes that wait; 2 blocks given up since the start
`
	if d := cmp.Diff(want, out.String()); d != "" || err != nil {
		t.Errorf("%v\n%s", err, d)
	}
}
