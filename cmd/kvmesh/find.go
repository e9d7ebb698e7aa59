package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// meshFlags tell a command which mesh to talk to.
type meshFlags struct {
	api     string
	admin   string
	gateway string
}

// addAPI adds --api, which is enough for every command: the control plane knows
// where the rest is.
func (f *meshFlags) addAPI(c *cobra.Command) {
	c.Flags().StringVar(&f.api, "api", "", "URL of the control plane's API (default KVMESH_API, else the last 'kvmesh up' of this folder)")
}

func (f *meshFlags) addAdmin(c *cobra.Command) {
	c.Flags().StringVar(&f.admin, "admin", "", "URL of Envoy's admin port (default KVMESH_ADMIN, else what the control plane says)")
}

func (f *meshFlags) addGateway(c *cobra.Command) {
	c.Flags().StringVar(&f.gateway, "gateway", "", "URL of the gateway's --metrics port (default KVMESH_GATEWAY, else what the control plane says)")
}

// given returns what flags and variables name, as complete URLs.
func (f meshFlags) given(e *env) (runningMesh, error) {
	var m runningMesh
	for _, v := range []struct {
		to                *string
		flag, name, value string
	}{
		{&m.API, "--api", "KVMESH_API", f.api},
		{&m.Admin, "--admin", "KVMESH_ADMIN", f.admin},
		{&m.Gateway, "--gateway", "KVMESH_GATEWAY", f.gateway},
	} {
		from := v.flag
		if v.value == "" {
			from, v.value = v.name, e.getenv(v.name)
		}
		var err error
		if *v.to, err = baseURL(from, v.value); err != nil {
			return m, err
		}
	}
	return m, nil
}

// find fills in what the flags leave open from the last `kvmesh up` of this folder,
// unless they name another control plane.
func (f meshFlags) find(e *env) (runningMesh, error) {
	m, err := f.given(e)
	if err != nil || m.API != "" {
		return m, err
	}
	last, err := lastUp(".")
	if err != nil {
		return m, withHint(err, "start one with `"+e.self()+" up -f FILE`, or name a control plane with --api URL or KVMESH_API")
	}
	m.API, m.OpenAI, m.PID, m.RunDir, m.KVDir = last.API, last.OpenAI, last.PID, last.RunDir, last.KVDir
	m.Admin, m.Gateway = cmp.Or(m.Admin, last.Admin), cmp.Or(m.Gateway, last.Gateway)
	return m, nil
}

// findAdmin is find for commands that also read Envoy's admin port.
func (f meshFlags) findAdmin(ctx context.Context, e *env) (runningMesh, error) {
	m, err := f.find(e)
	if err != nil || m.Admin != "" {
		return m, err
	}
	view, err := askMesh(ctx, m.API)
	if m.Admin = view.Admin; err == nil && m.Admin == "" {
		err = withHint(fmt.Errorf("the control plane at %s does not know Envoy's admin port", m.API),
			"give --admin URL or KVMESH_ADMIN, or start the control plane with --envoy-admin URL")
	}
	return m, err
}

// findGateway returns the gateway's URL.
func (f meshFlags) findGateway(ctx context.Context, e *env) (string, error) {
	if m, err := f.given(e); err != nil || m.Gateway != "" {
		return m.Gateway, err
	}
	m, err := f.find(e)
	if err != nil || m.Gateway != "" {
		return m.Gateway, err
	}
	view, err := askMesh(ctx, m.API)
	if err == nil && view.Gateway == "" {
		err = withHint(fmt.Errorf("the control plane at %s does not know the gateway", m.API),
			"give --gateway URL or KVMESH_GATEWAY, or start the control plane with --gateway URL")
	}
	return view.Gateway, err
}

func askMesh(ctx context.Context, api string) (fleet.MeshView, error) {
	return look(ctx, controlPlaneAt(api), fleet.NewClient(api).Mesh)
}

// lookTime is how long a command that only looks waits for one part's answer.
const lookTime = 2500 * time.Millisecond

// lookedAt is a part of the mesh as a command names it.
type lookedAt struct{ name, at, hint string }

func controlPlaneAt(api string) lookedAt { return lookedAt{"the control plane", api, hintControlPlane} }

// look asks a part something, and tells one that is there and says nothing from one that
// is away.
func look[T any](ctx context.Context, part lookedAt, ask func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	out, err := ask(bounded)
	switch {
	case err == nil:
		return out, nil
	case ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded):
		return out, withHint(fmt.Errorf("%s at %s does not answer within %v: it is stopped, hangs, or is overloaded: %w", part.name, part.at, lookTime, err),
			"requests are served meanwhile; when it stays so, end its process with kill -9: `kvmesh up` starts it again")
	}
	return out, withHint(err, part.hint)
}

const hintControlPlane = "is the control plane up, and is this its API? `kvmesh up` starts it again when it dies"

// lastUp reads .kvmesh/up.json in dir or the nearest folder above it.
func lastUp(dir string) (runningMesh, error) {
	var m runningMesh
	dir, err := filepath.Abs(dir)
	if err != nil {
		return m, fmt.Errorf("find the mesh: %w", err)
	}
	for {
		state := filepath.Join(dir, stateFolder)
		data, err := os.ReadFile(filepath.Join(state, upFile))
		if err == nil {
			if err := json.Unmarshal(data, &m); err != nil {
				return m, fmt.Errorf("find the mesh: %s: %w", filepath.Join(state, upFile), err)
			}
			if m.PID > 0 && errors.Is(syscall.Kill(m.PID, 0), syscall.ESRCH) {
				return m, fmt.Errorf("the mesh of %s is not running any more", dir)
			}
			return m, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return m, fmt.Errorf("find the mesh: %w", err)
		}
		if pid, held := supervise.Holder(filepath.Join(state, lockFile)); held {
			return m, fmt.Errorf("the mesh of %s is not ready yet (process %d starts or stops it)", dir, pid)
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return m, errors.New("no mesh is running in this folder")
		}
		dir = parent
	}
}
