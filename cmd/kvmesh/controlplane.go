package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/xds"
)

// controlPlaneOptions are the flags of `kvmesh controlplane`.
type controlPlaneOptions struct {
	envoyAdmin, gateway    string // URLs that GET /v1/mesh tells
	files                  []string
	runDir, xds            string
	openai, api, accessLog string
	stateDir, trustedCA    string
	redisCA                string
}

func controlPlaneCommand(e *env) *cobra.Command {
	o := controlPlaneOptions{}
	c := &cobra.Command{
		Use:   "controlplane -f FILE --run-dir DIR",
		Short: "Run the control plane: registry, health, xDS for Envoy and gateways",
		Long: `Run the control plane. Workers register at its HTTP API and report their load over
ORCA; Envoys and gateways connect to its xDS port (delta ADS). What it knows is kept
in --state-dir, so it may be killed and started again at any time.

Where the Mesh document has registry.redis, workers are read from there too.
REDIS_URL takes the place of its URL, so that no password stands in a file.`,
		Example: `  kvmesh controlplane -f mesh.yaml --run-dir /run/kvmesh --openai 127.0.0.1:8080 --api 127.0.0.1:9000`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkWords(c.Flags(), word{"openai", hostPort}, word{"api", hostPort}); err != nil {
				return err
			}
			return runControlPlane(c.Context(), e, o)
		},
	}
	f := c.Flags()
	policyFlag(c, &o.files)
	f.StringVar(&o.runDir, "run-dir", "", "folder of the mesh's Unix sockets, as Envoy and the gateway have it")
	f.StringVar(&o.xds, "xds", "", "where Envoys and gateways connect: a socket path or ip:port (default xds.sock in --run-dir)")
	f.StringVar(&o.openai, "openai", "127.0.0.1:8080", "ip:port where Envoy takes clients")
	f.StringVar(&o.envoyAdmin, "envoy-admin", "", "URL of Envoy's admin port, which 'kvmesh inspect' asks this control plane for")
	f.StringVar(&o.gateway, "gateway", "", "URL of the gateway's --metrics port, which 'kvmesh streams' asks for")
	f.StringVar(&o.api, "api", "127.0.0.1:9000", "ip:port of the HTTP API; it has no credentials, keep it on loopback")
	f.StringVar(&o.accessLog, "access-log", "", "file of Envoy's access log (default none)")
	f.StringVar(&o.stateDir, "state-dir", "", "folder for the registry and the snapshot (default controlplane in --run-dir)")
	f.StringVar(&o.trustedCA, "trusted-ca", systemCA(), "PEM file of the authorities that https servers are checked against")
	f.StringVar(&o.redisCA, "redis-ca", "", "PEM file of the authorities of a rediss:// registry (default the system's)")
	_ = c.MarkFlagRequired("run-dir")
	return c
}

// policyFlag adds -f to a part of the mesh.
func policyFlag(c *cobra.Command, files *[]string) {
	c.Flags().StringArrayVarP(files, "file", "f", nil, "policy file, may be repeated")
	_ = c.MarkFlagRequired("file")
}

// readPolicies reads and checks the files of -f.
func readPolicies(names []string) (*policy.Set, error) {
	set, _, err := loadPolicy(upOptions{files: names})
	return set, err
}

// systemCA returns the usual file of certificate authorities, "" when none of
// the usual ones is there.
func systemCA() string {
	for _, name := range []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"} {
		if _, err := os.Stat(name); err == nil {
			return name
		}
	}
	return ""
}

func runControlPlane(ctx context.Context, e *env, o controlPlaneOptions) error {
	set, err := readPolicies(o.files)
	if err != nil {
		return err
	}
	redisFromEnv(set, e.getenv)
	if o.runDir, err = filepath.Abs(o.runDir); err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	s := socketsIn(o.runDir)
	if o.xds == "" {
		o.xds = s.xds
	}
	if o.stateDir == "" {
		o.stateDir = cpStateDir(o.runDir)
	}
	if err := os.MkdirAll(o.stateDir, 0o700); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	var view fleet.MeshView
	if view.Admin, err = baseURL("--envoy-admin", o.envoyAdmin); err != nil {
		return err
	}
	if view.Gateway, err = baseURL("--gateway", o.gateway); err != nil {
		return err
	}
	if o.openai, err = policy.ListenAddress(o.openai); err != nil {
		return usagef("--openai %w", err)
	}
	api, err := listenTCP(ctx, o.api)
	if err != nil {
		return err
	}
	cp, err := xds.New(xds.Config{
		Mesh: view,
		Envoy: envoy.Config{
			Policy: set, Edge: o.openai, Egress: s.egress, Relay: s.relay, ExtProc: s.extProc,
			AccessLog: o.accessLog, TrustedCA: o.trustedCA,
		},
		ListenXDS: o.xds, ListenAPI: api, StateDir: o.stateDir, RedisCA: o.redisCA, Log: e.log.With("part", "controlplane"),
	})
	if err != nil {
		return err
	}
	return cp.Run(ctx)
}

// listenTCP listens, waiting a little for a process that was just killed to let
// go of its port.
func listenTCP(ctx context.Context, addr string) (net.Listener, error) {
	var err error
	for range 20 {
		var l net.Listener
		if l, err = net.Listen("tcp", addr); err == nil {
			return l, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil, fmt.Errorf("listen: %w", err)
}
