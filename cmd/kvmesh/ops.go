package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/rollout"
	"github.com/kvmesh/kvmesh/internal/supervise"
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

// Streams implements rollout.Mesh.
func (m *liveMesh) Streams(ctx context.Context) (fleet.StreamList, error) {
	var list fleet.StreamList
	err := get(ctx, m.gateway+"/v1/streams", &list)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fmt.Errorf("%w: %w", rollout.ErrNoGateway, err)
	}
	return list, err
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
		"KVMESH_WORKER_PID="+strings.TrimPrefix(pidText(w.PID), "-")) // none of a worker that is away
	c.Stdout, c.Stderr = m.output, m.output
	c.WaitDelay = time.Second // a daemon that it left behind may hold its output open
	if err := c.Run(); err != nil {
		return fmt.Errorf("%q: %w", m.command, err)
	}
	return nil
}

// terminate asks a worker of `kvmesh up` on this machine to end. One that is away is
// started by it in any case.
func terminate(w fleet.WorkerView) error {
	if w.Incarnation == 0 {
		return nil
	}
	if err := signalWorker(w, syscall.SIGTERM); err != nil {
		return withHint(err, "say how to restart it with --restart-cmd CMD")
	}
	return nil
}

// signalWorker sends a signal to a worker's process, after it made sure that the process
// is the worker: its number may be that of another process on this machine, where the
// worker runs on another one or has ended.
func signalWorker(w fleet.WorkerView, s syscall.Signal) error {
	p, err := os.FindProcess(int(w.PID)) // held from here on: its number goes to nobody else
	if err != nil {
		return fmt.Errorf("process %d of %s: %w", w.PID, w.ID, err)
	}
	defer func() { _ = p.Release() }() // it is only a handle
	if err := isHere(w); err != nil {
		return err
	}
	if err := p.Signal(s); err != nil {
		return fmt.Errorf("signal %v to process %d of %s: %w", s, w.PID, w.ID, err)
	}
	return nil
}

// isHere says why a worker's process is none that a signal from here reaches.
func isHere(w fleet.WorkerView) error {
	host, _ := os.Hostname() // without one no worker is here
	switch mark := supervise.ProcessMark(int(w.PID)); {
	case w.PID <= 0:
		return fmt.Errorf("%s runs on another machine, or tells nothing of its process", w.ID)
	case mark != "" && mark == w.Process, runtime.GOOS != "linux" && host != "" && host == w.Host:
		return nil
	case w.Host != "" && w.Host != host:
		return fmt.Errorf("%s runs on %s, and this is %s", w.ID, w.Host, host)
	}
	return fmt.Errorf("process %d of this machine is not %s, which ended or runs on another machine or in a container", w.PID, w.ID)
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
