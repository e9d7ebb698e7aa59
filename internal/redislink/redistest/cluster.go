package redistest

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Cluster is a real cluster on loopback: three masters and a replica of each, one
// process for each node.
type Cluster struct {
	// Nodes are the three first masters, and then the replica of each in their order.
	Nodes []*Server
}

const (
	masters = 3
	slots   = 16384
	// patience is how long a cluster may take to agree, on a busy machine.
	patience = time.Minute
)

// StartCluster runs a cluster whose nodes declare another dead after the given silence;
// it ends with the test. The test is skipped where there is no redis-server.
func StartCluster(t testing.TB, silence time.Duration) *Cluster {
	t.Helper()
	c := &Cluster{}
	addrs := freeAddrs(t, 4*masters) // each node has two
	for i := range 2 * masters {
		_, bus, err := net.SplitHostPort(addrs[2*i+1])
		if err != nil {
			t.Fatal(err)
		}
		c.Nodes = append(c.Nodes, startAt(t, addrs[2*i], "--cluster-enabled", "yes", "--cluster-port", bus,
			"--cluster-node-timeout", strconv.FormatInt(silence.Milliseconds(), 10),
			// Each part of the keys lives or dies for itself.
			"--cluster-require-full-coverage", "no", "--cluster-allow-replica-migration", "no",
			"--repl-diskless-sync-delay", "0"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.form(ctx); err != nil {
		t.Fatalf("form a cluster: %v", err)
	}
	return c
}

// form makes a cluster of single nodes, as redis-cli --cluster create does.
func (c *Cluster) form(ctx context.Context) error {
	for i, n := range c.Nodes {
		if err := n.Client.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			return fmt.Errorf("number a node: %w", err)
		}
		if i >= masters {
			continue
		}
		from, to := i*slots/masters, (i+1)*slots/masters-1
		if err := n.Client.Do(ctx, "cluster", "addslotsrange", from, to).Err(); err != nil {
			return fmt.Errorf("give out slots: %w", err)
		}
	}
	for _, n := range c.Nodes[1:] {
		host, port, err := net.SplitHostPort(n.Addr)
		if err != nil {
			return err
		}
		_, bus, _ := strings.Cut(strings.Join(n.args, " "), "--cluster-port ")
		bus, _, _ = strings.Cut(bus, " ")
		if err := c.Nodes[0].Client.Do(ctx, "cluster", "meet", host, port, bus).Err(); err != nil {
			return fmt.Errorf("introduce a node: %w", err)
		}
	}
	return c.replicate(ctx)
}

// replicate gives each master its replica, once all nodes know each other.
func (c *Cluster) replicate(ctx context.Context) error {
	known := func(n *Server) bool {
		nodes, err := n.Client.ClusterNodes(ctx).Result()
		return err == nil && strings.Count(nodes, "\n") == len(c.Nodes) && !strings.Contains(nodes, "handshake")
	}
	if err := c.await(ctx, "know each other", known); err != nil {
		return err
	}
	for i, n := range c.Nodes[masters:] {
		id, err := c.Nodes[i].Client.Do(ctx, "cluster", "myid").Text()
		if err == nil {
			err = n.Client.Do(ctx, "cluster", "replicate", id).Err()
		}
		if err != nil {
			return fmt.Errorf("make a replica: %w", err)
		}
	}
	return c.await(ctx, "agree", func(n *Server) bool {
		info, err1 := n.Client.ClusterInfo(ctx).Result()
		role, err2 := n.Client.Info(ctx, "replication").Result()
		return err1 == nil && err2 == nil && strings.Contains(info, "cluster_state:ok") &&
			strings.Contains(info, "cluster_slots_ok:16384") &&
			(strings.Contains(role, "role:master") && strings.Contains(role, "connected_slaves:1") || strings.Contains(role, "master_link_status:up"))
	})
}

// await waits until something is true of all nodes.
func (c *Cluster) await(ctx context.Context, what string, ok func(*Server) bool) error {
	for _, n := range c.Nodes {
		for !ok(n) {
			select {
			case <-ctx.Done():
				return fmt.Errorf("nodes do not %s: %w", what, ctx.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// URL names all nodes, for redislink.OpenCluster.
func (c *Cluster) URL() string {
	addrs := url.Values{}
	for _, n := range c.Nodes[1:] {
		addrs.Add("addr", n.Addr)
	}
	return c.Nodes[0].URL() + "?" + addrs.Encode()
}

// Each does something to all nodes that are alive and masters now.
func (c *Cluster) Each(ctx context.Context, do func(*Server) error) error {
	for _, n := range c.Nodes {
		role, err := n.Client.Info(ctx, "replication").Result()
		if err != nil || !strings.Contains(role, "role:master") {
			continue // dead, or a replica
		}
		if err := do(n); err != nil {
			return err
		}
	}
	return nil
}
