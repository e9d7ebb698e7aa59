package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
)

// seen is one side's belief about an endpoint.
type seen struct {
	Status string `json:"status"`
	Weight uint32 `json:"weight"`
}

// endpointDiff is what the control plane wants of one endpoint beside what
// Envoy believes.
type endpointDiff struct {
	Cluster string `json:"cluster"`
	ID      string `json:"id"`
	Address string `json:"address"`
	Want    seen   `json:"want"`
	Envoy   seen   `json:"envoy"`
	// Ejected and FailedCheck are Envoy's own observations.
	Ejected     bool `json:"ejected"`
	FailedCheck bool `json:"failed_check"`
	// Differs says what is different, "" when nothing is.
	Differs string `json:"differs"`
}

func inspectCommand(e *env) *cobra.Command {
	var f meshFlags
	var output string
	c := &cobra.Command{
		Use:   "inspect",
		Short: "Show what Envoy believes beside what the control plane wants",
		Long: `Show every endpoint as the control plane wants it and as Envoy has it, and mark
the differences. Envoy's admin port knows three words only: what the control plane
calls DRAINING or TIMEOUT, it shows as UNHEALTHY; that is no difference. A difference
that stays is a push that did not arrive, or Envoy's own ejection or health check.
While the control plane does not answer, Envoy's half is shown alone, and it fails.`,
		Example: `  kvmesh inspect
  kvmesh inspect --api 127.0.0.1:9000
  kvmesh inspect -o json | jq '.endpoints[] | select(.differs != "")'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			m, err := f.findAdmin(c.Context(), e)
			if err != nil {
				return err
			}
			// Without the control plane Envoy's half is worth all the more.
			want, unknown := look(c.Context(), controlPlaneAt(m.API), fleet.NewClient(m.API).Clusters)
			diffs, err := besideEnvoy(c.Context(), want, m.Admin)
			if err != nil {
				return errors.Join(unknown, err)
			}
			if unknown != nil {
				unknown = fmt.Errorf("what is wanted is not known, this is Envoy's half only: %w", unknown)
				for i := range diffs {
					diffs[i].Differs = "not known"
				}
			}
			listens := edgeListens(c.Context(), m.Admin)
			folder := m.RunDir == "" || isFolder(m.RunDir) // only the mesh of this folder says where its is
			if js {
				return errors.Join(writeJSON(e.stdout, map[string]any{
					"endpoints": diffs, "edge_listens": listens, "run_dir_exists": folder, "wanted_known": unknown == nil,
				}), unknown)
			}
			if !folder {
				fmt.Fprintf(e.stdout, "! The run folder %s is gone; `up` makes it again within some seconds, or says why it cannot.\n", m.RunDir)
			}
			if !listens {
				fmt.Fprintln(e.stdout, "! Envoy has no port for clients: does another process hold it? Nobody is served.")
			}
			return errors.Join(printDiffs(e.stdout, diffs), unknown)
		},
	}
	f.addAPI(c)
	f.addAdmin(c)
	outputFlag(c, &output)
	return c
}

// compareEndpoints reads both sides. The list is sorted by cluster and id.
func compareEndpoints(ctx context.Context, api, adminURL string) ([]endpointDiff, error) {
	want, err := fleet.NewClient(api).Clusters(ctx)
	if err != nil {
		return nil, withHint(err, hintControlPlane)
	}
	return besideEnvoy(ctx, want, adminURL)
}

// besideEnvoy puts what Envoy has beside what is wanted.
func besideEnvoy(ctx context.Context, want []fleet.ClusterView, adminURL string) ([]endpointDiff, error) {
	at := lookedAt{"Envoy", adminURL, "is Envoy up, and is this its admin port? --admin URL names another"}
	have, err := look(ctx, at, func(ctx context.Context) ([]admin.Cluster, error) {
		return admin.NewClient(adminURL).Clusters(ctx, "^"+names.PoolPrefix)
	})
	if err != nil {
		return nil, err
	}
	rows := map[string]*endpointDiff{}
	for _, cl := range want {
		for _, ep := range cl.Endpoints {
			rows[cl.Name+" "+ep.Address] = &endpointDiff{
				Cluster: cl.Name, ID: ep.ID, Address: ep.Address,
				Want: seen{ep.Status, ep.Weight},
			}
		}
	}
	for _, cl := range have {
		for _, h := range cl.Hosts {
			d := rows[cl.Name+" "+h.Address]
			if d == nil {
				d = &endpointDiff{Cluster: cl.Name, ID: h.WorkerID, Address: h.Address}
				rows[cl.Name+" "+h.Address] = d
			}
			d.Envoy = seen{h.EDSHealth, h.Weight}
			d.Ejected, d.FailedCheck = h.FailedOutlierCheck, h.FailedActiveHealthCheck
		}
	}
	out := make([]endpointDiff, 0, len(rows))
	for _, d := range rows {
		d.Differs = difference(*d)
		out = append(out, *d)
	}
	sort.Slice(out, func(i, j int) bool {
		return out[i].Cluster+" "+out[i].ID < out[j].Cluster+" "+out[j].ID
	})
	return out, nil
}

func difference(d endpointDiff) string {
	var parts []string
	switch {
	case d.Envoy.Status == "":
		return "not in envoy"
	case d.Want.Status == "":
		return "not wanted"
	case d.Envoy.Status != admin.Shown(d.Want.Status):
		parts = append(parts, "status")
	}
	if d.Envoy.Weight != d.Want.Weight {
		parts = append(parts, weightDiffers)
	}
	// Of a worker that nobody may use, Envoy's own opinion changes nothing.
	unused := admin.Shown(d.Want.Status) == admin.Shown("UNHEALTHY")
	if d.Ejected && !unused {
		parts = append(parts, "ejected by envoy")
	}
	if d.FailedCheck && !unused {
		parts = append(parts, "fails envoy's health check")
	}
	return strings.Join(parts, ", ")
}

const weightDiffers = "weight"

// onlyWeight reports a difference that a push on its way explains.
func onlyWeight(d endpointDiff) bool { return d.Differs == weightDiffers }

func printDiffs(w io.Writer, diffs []endpointDiff) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "\tCLUSTER\tENDPOINT\tADDRESS\tWANTED\tENVOY\tWANTED WEIGHT\tENVOY WEIGHT\tDIFFERENCE")
	for _, d := range diffs {
		mark := " "
		if d.Differs != "" {
			mark = "!"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", mark, d.Cluster, dash(d.ID), d.Address, dash(d.Want.Status), dash(d.Envoy.Status),
			d.Want.Weight, d.Envoy.Weight, d.Differs)
	}
	return t.Flush()
}
