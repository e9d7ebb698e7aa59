package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/rollout"
)

// liveMesh is the running mesh as drains and rollouts use it.
type liveMesh struct {
	client  *fleet.Client
	gateway string
	// command restarts a worker; "" sends SIGTERM to its process on this machine,
	// which `kvmesh up` then starts again.
	command string
	// least overrides the pool's minimum, negative for the pool's own.
	least  int
	output io.Writer // of command
}

var _ rollout.Mesh = (*liveMesh)(nil)

// openMesh finds the mesh that the flags name.
func openMesh(ctx context.Context, e *env, f meshFlags) (*liveMesh, error) {
	m, err := f.find(e)
	if err != nil {
		return nil, err
	}
	gateway, err := f.findGateway(ctx, e)
	if err != nil {
		return nil, err
	}
	return &liveMesh{client: fleet.NewClient(m.API), gateway: gateway, least: -1, output: e.stderr}, nil
}

// opsFlags adds the flags that say which mesh to change.
func opsFlags(c *cobra.Command, f *meshFlags) {
	f.addAPI(c)
	f.addGateway(c)
}

// Workers implements rollout.Mesh.
func (m *liveMesh) Workers(ctx context.Context) ([]fleet.WorkerView, error) {
	list, err := m.client.Workers(ctx)
	if err != nil {
		return nil, withHint(err, hintControlPlane)
	}
	return list, nil
}

// Streams implements rollout.Mesh. A gateway that is away carries no streams.
func (m *liveMesh) Streams(ctx context.Context) ([]fleet.StreamView, error) {
	var list fleet.StreamList
	err := get(ctx, m.gateway+"/v1/streams", &list)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	return list.Streams, err
}

// Minimum implements rollout.Mesh.
func (m *liveMesh) Minimum(ctx context.Context, pool string) (int, error) {
	if m.least >= 0 {
		return m.least, nil
	}
	clusters, err := m.client.Clusters(ctx)
	if err != nil {
		return 0, err
	}
	for _, c := range clusters {
		if c.Name == names.PoolCluster(pool) {
			return c.Minimum, nil
		}
	}
	return 0, fmt.Errorf("the control plane knows no pool %q", pool)
}

// SetDrain implements rollout.Mesh.
func (m *liveMesh) SetDrain(ctx context.Context, id string, on, keepStreams bool) error {
	if on && keepStreams {
		return m.client.DrainKeeping(ctx, id)
	}
	return m.client.Drain(ctx, id, on)
}

// Restart implements rollout.Mesh.
func (m *liveMesh) Restart(ctx context.Context, w fleet.WorkerView) error {
	if m.command == "" {
		return terminate(w)
	}
	c := exec.CommandContext(ctx, "/bin/sh", "-c", m.command)
	c.Env = append(os.Environ(), "KVMESH_WORKER="+w.ID, "KVMESH_WORKER_ADDRESS="+w.Address, "KVMESH_WORKER_POOL="+w.Pool,
		"KVMESH_WORKER_PID="+pidText(w.PID))
	c.Stdout, c.Stderr = m.output, m.output
	c.WaitDelay = time.Second // a daemon that it left behind may hold its output open
	if err := c.Run(); err != nil {
		return fmt.Errorf("%q: %w", m.command, err)
	}
	return nil
}

// terminate asks a worker of `kvmesh up` on this machine to end.
func terminate(w fleet.WorkerView) error {
	if w.PID <= 0 {
		return withHint(fmt.Errorf("nobody here can restart %s: it runs on another machine", w.ID), "say how with --restart-cmd CMD")
	}
	if err := syscall.Kill(int(w.PID), syscall.SIGTERM); err != nil {
		return withHint(fmt.Errorf("end process %s of %s: %w", strconv.FormatInt(w.PID, 10), w.ID, err), "say how to restart it with --restart-cmd CMD")
	}
	return nil
}

// workerNames completes the ids of workers.
func workerNames(e *env, f *meshFlags) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		m, err := f.find(e)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx := cmp.Or[context.Context](c.Context(), context.Background())
		list, err := fleet.NewClient(m.API).Workers(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var out []cobra.Completion
		for _, w := range list {
			out = append(out, cobra.CompletionWithDesc(w.ID, w.Status+" "+w.Model))
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}
