package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
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
	expired := fmt.Errorf("not ready after %v", timeout)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, expired)
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
		if err := m.refused(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); cause != expired {
				return ctx.Err() // a signal
			}
			return withHint(fmt.Errorf("%w; waiting for %s", expired, last), m.waitHint())
		case exit := <-m.group.Exits():
			ended[exit.Name]++
			if ended[exit.Name] == 3 {
				return withHint(fmt.Errorf("%s ends again and again: %w", exit.Name, exit.Reason()), m.endHint(exit.Name))
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

// waitHint says where to look when something never gets ready.
func (m *localMesh) waitHint() string {
	return "Envoy's log is " + m.logFile("envoy.log") + ", the others' are above; --ready-timeout waits longer"
}

// refused reports an Envoy that runs and cannot listen, which nothing but another
// start would change.
func (m *localMesh) refused(ctx context.Context) error {
	const stat = "listener_manager.lds.update_rejected"
	if !m.ownEnvoy(ctx) || m.edgeListens(ctx) {
		return nil
	}
	envoy := admin.NewClient(m.ready().Admin)
	stats, err := envoy.Stats(ctx, "^"+regexp.QuoteMeta(stat)+"$")
	if err != nil || stats[stat] == 0 {
		return nil
	}
	why, err := envoy.Refusal(ctx, names.ListenerEdge)
	if err != nil {
		return nil // asked again in a moment
	}
	return portError(m.addr.openai, why, m.logFile("envoy.log"))
}

// portError words what Envoy says of the clients' listener that it refused.
func portError(addr, why, log string) error {
	where := "what Envoy says is in " + log
	if strings.Contains(why, "Address already in use") {
		return withHint(fmt.Errorf("envoy cannot listen on %s: another process took it", addr), "--openai 127.0.0.1:0 takes a free port; "+where)
	}
	return withHint(fmt.Errorf("envoy refuses to listen on %s: %s", addr, cmp.Or(why, "it does not say why")), where)
}

// missing lists what is not ready yet, in the order in which it comes up. A part of
// another mesh that answers at our address does not count.
func (m *localMesh) missing(ctx context.Context) []string {
	var out []string
	if view, err := fleet.NewClient(m.ready().API).Mesh(ctx); err != nil || view.PID != m.group.PID("controlplane") {
		out = append(out, "control plane")
	}
	if !m.ownGateway(ctx) {
		out = append(out, "gateway")
	}
	out = append(out, m.missingWorkers(ctx)...)
	if m.servesEngines() && !m.ownLMCache(ctx) {
		out = append(out, "lmcache to listen on "+m.set.Mesh.KV.LMCache.Listen)
	}
	if !m.ownEnvoy(ctx) {
		out = append(out, "envoy")
	}
	if len(out) == 0 && !m.edgeListens(ctx) {
		out = append(out, "envoy to listen on "+m.addr.openai)
	}
	if len(out) == 0 {
		out = m.missingEndpoints(ctx)
	}
	if len(out) == 0 && !m.extProcHealthy(ctx) {
		out = append(out, "gateway (in envoy)")
	}
	return out
}

// ownGateway reports whether the gateway that this process started is ready.
func (m *localMesh) ownGateway(ctx context.Context) bool {
	header, err := ask(ctx, "http://"+m.addr.metrics+"/health", nil)
	return err == nil && header.Get(headerPID) == strconv.Itoa(m.group.PID("gateway"))
}

// ownLMCache reports whether the part that this process started listens for engines.
func (m *localMesh) ownLMCache(ctx context.Context) bool {
	pid, err := socketOwner(ctx, m.lmcacheSocket())
	return err == nil && pid == m.group.PID(partLMCache)
}

// ownEnvoy reports whether the Envoy that this process started is ready.
func (m *localMesh) ownEnvoy(ctx context.Context) bool {
	info, err := admin.NewClient(m.ready().Admin).ServerInfo(ctx)
	return err == nil && info.State == "LIVE" && info.Node.ID == m.envoyNode()
}

// edgeListens reports whether Envoy has its port for clients.
func (m *localMesh) edgeListens(ctx context.Context) bool { return edgeListens(ctx, m.ready().Admin) }

// edgeListens asks an Envoy's admin port whether it has its port for clients.
func edgeListens(ctx context.Context, adminURL string) bool {
	var body struct {
		Listeners []struct {
			Name string `json:"name"`
		} `json:"listener_statuses"`
	}
	if get(ctx, adminURL+"/listeners?format=json", &body) != nil {
		return false
	}
	for _, l := range body.Listeners {
		if l.Name == names.ListenerEdge {
			return true
		}
	}
	return false
}

// missingWorkers asks the workers themselves for their progress and the control
// plane for its view of them.
func (m *localMesh) missingWorkers(ctx context.Context) []string {
	known := map[string]fleet.WorkerView{}
	if list, err := fleet.NewClient(m.ready().API).Workers(ctx); err == nil {
		for _, w := range list {
			known[w.ID] = w
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
		case known[w.ID].Status != healthy || known[w.ID].PID != int64(m.group.PID(w.ID)):
			out = append(out, w.ID+" (to be taken in)")
		}
	}
	for _, p := range m.set.Pools {
		if p.Engine == policy.EngineOpenAI {
			out = append(out, missingServers(p, known)...)
		}
	}
	return out
}

// healthy is the status of a worker that takes requests.
const healthy = "HEALTHY"

// missingServers lists the existing servers of a pool with what is wrong with each,
// as long as none of them is healthy: one is enough to begin.
func missingServers(p policy.WorkerPool, known map[string]fleet.WorkerView) []string {
	var out []string
	for _, s := range p.Static {
		w := known[s.ID]
		if w.Status == healthy {
			return nil
		}
		out = append(out, fmt.Sprintf("%s (%s)", s.URL, complaint(w)))
	}
	return out
}

// complaint is a worker's status with its reason, for people.
func complaint(w fleet.WorkerView) string {
	switch {
	case w.Status == "":
		return "not asked yet"
	case w.Reason == "":
		return w.Status
	}
	return w.Status + ": " + w.Reason
}

// warnServers says which existing servers take no requests although the mesh is
// ready.
func (m *localMesh) warnServers(ctx context.Context) {
	list, err := fleet.NewClient(m.ready().API).Workers(ctx)
	if err != nil {
		return // it answered a moment ago; what it says can be asked at any time
	}
	for _, w := range list {
		pool := m.set.Pool(w.Pool)
		if pool != nil && pool.Engine == policy.EngineOpenAI && w.Status != healthy {
			fmt.Fprintf(m.e.stderr, "warning: %s takes no requests: %s\n", w.ID, complaint(w))
		}
	}
}

// warnPools says which pools have nobody to serve them until workers register.
func (m *localMesh) warnPools() {
	if m.set.Mesh.Registry.Redis != "" || m.e.getenv("REDIS_URL") != "" {
		return // they are found there
	}
	for _, p := range m.set.Pools {
		if len(p.Local) == 0 && len(p.Static) == 0 {
			fmt.Fprintf(m.e.stderr, "warning: WorkerPool %s has no workers, neither local nor static: requests for it are answered 503 until some register (kvmesh worker --pool %s --control-plane %s)\n",
				p.Name, p.Name, m.addr.api)
		}
	}
}

// missingEndpoints asks Envoy whether it takes the workers for healthy.
func (m *localMesh) missingEndpoints(ctx context.Context) []string {
	diffs, err := compareEndpoints(ctx, m.ready().API, m.ready().Admin)
	if err != nil {
		return []string{"envoy's endpoints"}
	}
	var out []string
	for _, d := range diffs {
		if d.Want.Status == healthy && d.Differs != "" && !onlyWeight(d) {
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
	_, err := ask(ctx, url, v)
	return err
}

// mostAnswer bounds what is read of an answer: ten thousand streams are 4 MB.
const mostAnswer = 64 << 20

// ask is get that also returns the header of the answer.
func ask(ctx context.Context, url string, v any) (http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	req.Close = true // a process that was replaced goes on to answer on old connections
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer))
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	if v != nil {
		if err := json.Unmarshal(body, v); err != nil {
			return nil, fmt.Errorf("get %s: %w", url, err)
		}
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("get %s: status %d", url, resp.StatusCode)
	}
	return resp.Header, nil
}
