package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
)

// meshFlags tell a command which mesh to talk to.
type meshFlags struct {
	api     string
	admin   string
	gateway string
}

func (f *meshFlags) add(c *cobra.Command, admin bool) {
	c.Flags().StringVar(&f.api, "api", "", "URL of the control plane's API (default KVMESH_API, else the last `kvmesh up` of this folder)")
	if admin {
		c.Flags().StringVar(&f.admin, "admin", "", "URL of Envoy's admin port (default KVMESH_ADMIN, else as --api)")
	}
}

// find fills in what the flags leave open.
func (f meshFlags) find(e *env) (runningMesh, error) {
	m := runningMesh{Gateway: e.getenvOr("KVMESH_GATEWAY", f.gateway)}
	m.API, m.Admin = e.getenvOr("KVMESH_API", f.api), e.getenvOr("KVMESH_ADMIN", f.admin)
	if m.API != "" && m.Admin != "" {
		return m, nil
	}
	last, err := lastUp(".")
	switch {
	case err == nil:
		if m.API == "" {
			m.API = last.API
			if m.Admin == "" {
				m.Admin = last.Admin
			}
		}
		m.OpenAI, m.PID = last.OpenAI, last.PID
		if m.Gateway == "" {
			m.Gateway = last.Gateway
		}
		return m, nil
	case m.API != "":
		return m, nil
	}
	return m, withHint(err, "start one with `kvmesh up -f FILE`, or name a control plane with --api URL or KVMESH_API")
}

// lastUp reads .kvmesh/up.json in dir or the nearest folder above it.
func lastUp(dir string) (runningMesh, error) {
	var m runningMesh
	dir, err := filepath.Abs(dir)
	if err != nil {
		return m, fmt.Errorf("find the mesh: %w", err)
	}
	for {
		data, err := os.ReadFile(filepath.Join(dir, ".kvmesh", "up.json"))
		if err == nil {
			if err := json.Unmarshal(data, &m); err != nil {
				return m, fmt.Errorf("find the mesh: %s: %w", filepath.Join(dir, ".kvmesh", "up.json"), err)
			}
			if m.PID > 0 && errors.Is(syscall.Kill(m.PID, 0), syscall.ESRCH) {
				return m, fmt.Errorf("the mesh of %s is not running any more", dir)
			}
			return m, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return m, fmt.Errorf("find the mesh: %w", err)
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return m, errors.New("no mesh is running in this folder")
		}
		dir = parent
	}
}

// getenvOr returns the flag's value, or where it is empty the variable's.
func (e *env) getenvOr(name, flag string) string {
	if flag != "" {
		return flag
	}
	return e.getenv(name)
}
