//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Peers is what a node knows of the nodes of other hosts, which keep copies for it.
type Peers struct {
	// ID and Zone are the node's own, and Replicas is how many hosts are to have each block,
	// its own included.
	ID       string `json:"id"`
	Zone     string `json:"zone,omitempty"`
	Replicas int    `json:"replicas"`
	// Behind is what of this node is on no other host.
	Behind PeerBehind `json:"not_on_a_second_host"`
	Nodes  []PeerNode `json:"nodes"` // by id
}

// PeerBehind is what is lost if a host is lost now.
type PeerBehind struct {
	// Tokens are those of blocks that wait, of which Blocks and Bytes are the rest, and those
	// of the open ends of streams.
	Tokens int64 `json:"tokens"`
	Blocks int64 `json:"blocks"`
	Bytes  int64 `json:"bytes"`
	// GivenUp is how many blocks were not copied since the node's start and do not wait.
	GivenUp int64 `json:"blocks_given_up"`
}

// PeerNode is one node of another host.
type PeerNode struct {
	ID      string `json:"id"`
	Zone    string `json:"zone,omitempty"`
	Address string `json:"address,omitempty"`
	// State is "up", "failing" or "left", and Trouble why it is not up.
	State   string `json:"state"`
	Trouble string `json:"trouble,omitempty"`
	// Answered is when it answered last, by the clock of the node that was asked; zero = it
	// has not since that started.
	Answered time.Time `json:"last_answer,omitzero"`
	// Used and Limit are bytes of its memory, as it said last; Limit 0 = it has not.
	Used  int64 `json:"used_bytes"`
	Limit int64 `json:"limit_bytes"`
	// Copied are blocks, and CopiedBytes their bytes, that this node has put there since its
	// start.
	Copied      uint64 `json:"copied_blocks"`
	CopiedBytes uint64 `json:"copied_bytes"`
	// Owed is how many tenants and models it is still to forget.
	Owed int `json:"still_to_forget,omitempty"`
}

// errNoPeers says that a node keeps no copies anywhere.
var errNoPeers = errors.New("this KV node knows no nodes of other hosts")

// others is the operation.
func (s *Server) others() ([]byte, error) {
	if s.peers == nil {
		return nil, errNoPeers
	}
	return json.Marshal(s.peers())
}

// Peers asks the node for what it knows of those of other hosts.
func (c *Client) Peers(ctx context.Context) (p Peers, err error) {
	err = c.ask(ctx, opPeers, nil, func(_ *conn, body cursor) error { return json.Unmarshal(body.Rest(), &p) })
	if err != nil {
		return p, fmt.Errorf("list the KV nodes of other hosts: %w", err)
	}
	return p, nil
}
