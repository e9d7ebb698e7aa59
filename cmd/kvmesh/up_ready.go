package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

const pollEvery = 100 * time.Millisecond

// waitReady waits until a request to Envoy would be served by a worker, telling
// on stderr what it waits for whenever that changes.
func (m *localMesh) waitReady(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not ready after %v", timeout))
	defer cancel()
	ended := map[string]int{}
	last := ""
	for {
		missing := m.missing(ctx)
		if len(missing) == 0 {
			return nil
		}
		if now := strings.Join(missing, ", "); now != last {
			last = now
			fmt.Fprintf(m.e.stderr, "waiting for %s\n", now)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; waiting for %s", context.Cause(ctx), last)
		case exit := <-m.group.Exits():
			ended[exit.Name]++
			if ended[exit.Name] == 3 {
				return withHint(fmt.Errorf("%s ends again and again: %w", exit.Name, exit.Err), m.endHint(exit.Name))
			}
		case <-time.After(pollEvery):
		}
	}
}

func (m *localMesh) endHint(child string) string {
	if child == "envoy" {
		return "its log is " + m.logFile("envoy.log")
	}
	return "its log is above"
}

// missing lists what is not ready yet, in the order in which it comes up.
func (m *localMesh) missing(ctx context.Context) []string {
	var out []string
	if get(ctx, "http://"+m.addr.api+"/healthz", nil) != nil {
		out = append(out, "control plane")
	}
	if get(ctx, "http://"+m.addr.metrics+"/health", nil) != nil {
		out = append(out, "gateway")
	}
	out = append(out, m.missingWorkers(ctx)...)
	if get(ctx, "http://"+m.addr.admin+"/ready", nil) != nil {
		out = append(out, "envoy")
	}
	if len(out) == 0 {
		out = m.missingEndpoints(ctx)
	}
	if len(out) == 0 && !m.extProcHealthy(ctx) {
		out = append(out, "gateway (in envoy)")
	}
	return out
}

// missingWorkers asks the workers themselves for their progress and the control
// plane for its view of them. Of existing servers one per pool is enough.
func (m *localMesh) missingWorkers(ctx context.Context) []string {
	status := map[string]string{}
	healthy := map[string]bool{} // pools
	if list, err := fleet.NewClient("http://" + m.addr.api).Workers(ctx); err == nil {
		for _, w := range list {
			status[w.ID] = w.Status
			healthy[w.Pool] = healthy[w.Pool] || w.Status == "HEALTHY"
		}
	}
	var out []string
	for _, w := range m.workers {
		var ready struct {
			Status  string  `json:"status"`
			Percent float64 `json:"percent"`
		}
		switch err := get(ctx, "http://"+w.addr+"/ready", &ready); {
		case err != nil && ready.Status == "loading":
			out = append(out, fmt.Sprintf("%s (loading %.0f %%)", w.ID, ready.Percent))
		case err != nil:
			out = append(out, w.ID)
		case status[w.ID] != "HEALTHY":
			out = append(out, w.ID+" (to be taken in)")
		}
	}
	for _, p := range m.set.Pools {
		if p.Engine == policy.EngineOpenAI && !healthy[p.Name] {
			urls := make([]string, 0, len(p.Static))
			for _, s := range p.Static {
				urls = append(urls, s.URL)
			}
			out = append(out, fmt.Sprintf("a server of pool %s (%s)", p.Name, strings.Join(urls, " ")))
		}
	}
	return out
}

// missingEndpoints asks Envoy whether it takes the workers for healthy.
func (m *localMesh) missingEndpoints(ctx context.Context) []string {
	diffs, err := compareEndpoints(ctx, m.ready().API, m.ready().Admin)
	if err != nil {
		return []string{"envoy's endpoints"}
	}
	var out []string
	for _, d := range diffs {
		if d.Want.Status == "HEALTHY" && d.Differs != "" && !onlyWeight(d) {
			out = append(out, d.ID+" (in envoy)")
		}
	}
	slices.Sort(out)
	return out
}

// extProcHealthy reports whether Envoy asks the gateway; before its first check
// of it, requests pass the gateway by.
func (m *localMesh) extProcHealthy(ctx context.Context) bool {
	list, err := admin.NewClient(m.ready().Admin).Clusters(ctx, "^"+names.ClusterExtProc+"$")
	return err == nil && len(list) == 1 && len(list[0].Hosts) == 1 && !list[0].Hosts[0].FailedActiveHealthCheck
}

// get fetches a URL that must answer 200; a JSON body is decoded into v, when v
// is not nil, whatever the status.
func get(ctx context.Context, url string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("get %s: %w", url, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("get %s: %w", url, err)
	}
	if v != nil {
		if err := json.Unmarshal(body, v); err != nil {
			return fmt.Errorf("get %s: %w", url, err)
		}
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: status %d", url, resp.StatusCode)
	}
	return nil
}
