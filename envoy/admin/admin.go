// Package admin reads Envoy's admin interface: what it believes of clusters and
// their hosts, its counters and gauges. Reads are bounded in time and size.
package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// Client reads one Envoy's admin interface. It is safe for concurrent use.
type Client struct {
	base string
	http *http.Client
}

// Bounds of one read. An Envoy with 5,000 hosts answers with 3.6 MB in less than
// a second of its main thread.
const (
	readTimeout = 10 * time.Second
	mostBytes   = 64 << 20
)

// NewClient returns a Client for a URL like http://127.0.0.1:9901.
func NewClient(base string) *Client {
	return &Client{base: strings.TrimSuffix(base, "/"), http: &http.Client{Timeout: readTimeout}}
}

// Cluster is one cluster with its hosts, in Envoy's order.
type Cluster struct {
	Name  string `json:"name"`
	Hosts []Host `json:"hosts"`
}

// Host is one endpoint as Envoy sees it.
type Host struct {
	Address  string `json:"address"`   // ip:port, or the path of a Unix socket
	WorkerID string `json:"worker_id"` // the host name of its EDS endpoint
	Zone     string `json:"zone"`
	Weight   uint32 `json:"weight"`
	// EDSHealth is the status the control plane sent, as far as Envoy shows it:
	// see Shown.
	EDSHealth string `json:"eds_health"`
	// Envoy's own observations.
	FailedActiveHealthCheck bool `json:"failed_active_health_check"`
	FailedOutlierCheck      bool `json:"failed_outlier_check"`
	PendingRemoval          bool `json:"pending_removal"`
	ActiveRequests          int  `json:"active_requests"`
}

// Shown returns the word by which /clusters shows an EDS status: HEALTHY and
// DEGRADED as they are, UNHEALTHY for every status that takes no traffic.
func Shown(status string) string {
	switch status {
	case "UNHEALTHY", "DRAINING", "TIMEOUT":
		return "UNHEALTHY"
	case "UNKNOWN":
		return "HEALTHY"
	}
	return status
}

// clustersBody is the shape of /clusters?format=json, as far as it is used.
type clustersBody struct {
	ClusterStatuses []struct {
		Name         string       `json:"name"`
		HostStatuses []hostStatus `json:"host_statuses"`
	} `json:"cluster_statuses"`
}

// hostStatus is one host of clustersBody, under Envoy's own names.
type hostStatus struct {
	Address struct {
		SocketAddress *struct {
			Address   string `json:"address"`
			PortValue uint16 `json:"port_value"`
		} `json:"socket_address"`
		Pipe *struct {
			Path string `json:"path"`
		} `json:"pipe"`
	} `json:"address"`
	Hostname string `json:"hostname"`
	Locality struct {
		Zone string `json:"zone"`
	} `json:"locality"`
	Weight       uint32 `json:"weight"`
	HealthStatus struct {
		EDS            string `json:"eds_health_status"`
		FailedActive   bool   `json:"failed_active_health_check"`
		FailedOutlier  bool   `json:"failed_outlier_check"`
		PendingRemoval bool   `json:"pending_dynamic_removal"`
	} `json:"health_status"`
	Stats []struct {
		Name  string      `json:"name"`
		Value json.Number `json:"value"`
	} `json:"stats"`
}

// Clusters returns the clusters whose names match the regular expression, all of
// them for "".
func (c *Client) Clusters(ctx context.Context, filter string) ([]Cluster, error) {
	// Without a filter Envoy writes every host of every cluster on its main thread.
	q := url.Values{"format": {"json"}}
	if filter != "" {
		q.Set("filter", filter)
	}
	var body clustersBody
	if err := c.getJSON(ctx, "/clusters?"+q.Encode(), &body); err != nil {
		return nil, err
	}
	out := make([]Cluster, 0, len(body.ClusterStatuses))
	for _, cs := range body.ClusterStatuses {
		cl := Cluster{Name: cs.Name}
		for _, h := range cs.HostStatuses {
			cl.Hosts = append(cl.Hosts, h.host())
		}
		out = append(out, cl)
	}
	return out, nil
}

// host translates into the form the rest of the mesh uses.
func (h hostStatus) host() Host {
	out := Host{
		WorkerID: h.Hostname, Zone: h.Locality.Zone, Weight: h.Weight, EDSHealth: h.HealthStatus.EDS,
		FailedActiveHealthCheck: h.HealthStatus.FailedActive, FailedOutlierCheck: h.HealthStatus.FailedOutlier,
		PendingRemoval: h.HealthStatus.PendingRemoval,
	}
	switch a := h.Address; {
	case a.Pipe != nil:
		out.Address = a.Pipe.Path
	case a.SocketAddress != nil:
		out.Address = a.SocketAddress.Address
		if ip, err := netip.ParseAddr(a.SocketAddress.Address); err == nil {
			out.Address = netip.AddrPortFrom(ip, a.SocketAddress.PortValue).String()
		}
	}
	for _, s := range h.Stats {
		if s.Name == "rq_active" {
			n, err := s.Value.Int64()
			if err == nil {
				out.ActiveRequests = int(n)
			}
		}
	}
	return out
}

// Refusal returns why Envoy refused its last update of a listener, "" when it did not:
// the last line, which has no configuration in it.
func (c *Client) Refusal(ctx context.Context, listener string) (string, error) {
	var body struct {
		Configs []struct {
			Name  string `json:"name"`
			Error struct {
				Details string `json:"details"`
			} `json:"error_state"`
		} `json:"configs"`
	}
	if err := c.getJSON(ctx, "/config_dump?resource=dynamic_listeners", &body); err != nil {
		return "", err
	}
	for _, l := range body.Configs {
		if l.Name == listener && l.Error.Details != "" {
			lines := strings.Split(strings.TrimSpace(l.Error.Details), "\n")
			return strings.TrimPrefix(lines[len(lines)-1], ": "), nil
		}
	}
	return "", nil
}

// Stats returns the counters and gauges whose names match the regular
// expression; histograms are left out.
func (c *Client) Stats(ctx context.Context, filter string) (map[string]uint64, error) {
	var body struct {
		Stats []struct {
			Name  string          `json:"name"`
			Value json.RawMessage `json:"value"`
		} `json:"stats"`
	}
	q := url.Values{"format": {"json"}, "filter": {filter}}
	if err := c.getJSON(ctx, "/stats?"+q.Encode(), &body); err != nil {
		return nil, err
	}
	out := make(map[string]uint64, len(body.Stats))
	for _, s := range body.Stats {
		var n uint64
		if s.Name != "" && json.Unmarshal(s.Value, &n) == nil { // text readouts are no numbers
			out[s.Name] = n
		}
	}
	return out, nil
}

// ServerInfo is what an Envoy says of itself.
type ServerInfo struct {
	Version string `json:"version"`
	State   string `json:"state"` // LIVE, DRAINING, PRE_INITIALIZING, INITIALIZING
	Node    struct {
		ID string `json:"id"`
	} `json:"node"`
	Options struct {
		RestartEpoch int `json:"restart_epoch"` // how many Envoys it follows in a hot restart
	} `json:"command_line_options"`
}

// ServerInfo returns version and state.
func (c *Client) ServerInfo(ctx context.Context) (ServerInfo, error) {
	var info ServerInfo
	err := c.getJSON(ctx, "/server_info", &info)
	return info, err
}

// Ready reports whether Envoy takes requests; the error says why not.
func (c *Client) Ready(ctx context.Context) error {
	_, err := c.get(ctx, "/ready")
	return err
}

// getJSON reads a page of JSON into v; unknown fields are Envoy's business.
func (c *Client) getJSON(ctx context.Context, path string, v any) error {
	raw, err := c.get(ctx, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("envoy admin %s: %w", path, err)
	}
	return nil
}

// get reads one page. Any status but 200 is an error that quotes the beginning of
// the page, where Envoy says what is wrong.
func (c *Client) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+path, nil)
	if err != nil {
		return nil, fmt.Errorf("envoy admin: %w", err)
	}
	// An Envoy that was replaced by another goes on to answer on old connections.
	req.Close = true
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("envoy admin: %w", err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, mostBytes))
	if err != nil {
		return nil, fmt.Errorf("envoy admin %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("envoy admin %s: status %d: %.200s", path, resp.StatusCode, raw)
	}
	return raw, nil
}
