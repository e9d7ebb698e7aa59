package registry

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Limits of a probe.
const (
	probeEvery   = time.Second
	probeTimeout = 2 * time.Second
	modelsEvery  = 30 * time.Second // how often the model names are asked again
	maxPage      = 8 << 20          // most bytes read of one page
)

// Server is one existing OpenAI-compatible server of a policy.
type Server struct {
	ID, Pool, Zone string
	TLS            bool   // reached over https
	Host           string // host of its URL, a name or an IP address
	Port           string // always given
	Check          string // path that says whether it is well, "off" for none
}

// Servers lists the static servers of a policy.
func Servers(set *policy.Set) ([]Server, error) {
	var out []Server
	for _, p := range set.Pools {
		for _, s := range p.Static {
			u, err := url.Parse(s.URL)
			if err != nil {
				return nil, fmt.Errorf("WorkerPool %s: %w", p.Name, err)
			}
			port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
			out = append(out, Server{
				ID: s.ID, Pool: p.Name, Zone: s.Zone, TLS: u.Scheme == "https",
				Host: u.Hostname(), Port: port, Check: p.Health.Check,
			})
		}
	}
	return out, nil
}

// Hostname is what the server calls itself in host headers. With TLS it is the
// name its certificate carries, which has no port.
func (s Server) Hostname() string {
	switch {
	case s.TLS || s.Port == "80" && !strings.Contains(s.Host, ":"):
		return s.Host
	case s.Port == "80":
		return "[" + s.Host + "]"
	}
	return net.JoinHostPort(s.Host, s.Port)
}

// Observation is what one probe found.
type Observation struct {
	At      time.Time
	Address string   // ip:port, "" when the name does not resolve
	Failed  string   // why the server certainly does not work, "" when it does
	Silent  bool     // no answer in time: it may be dead or slow
	Models  []string // names it serves, nil when unknown
	Load    *Load    // nil when it exposes no metrics we know
}

// Prober watches one Server.
type Prober struct {
	server Server
	client *http.Client // connects to address, whatever the URL's host
	dialer net.Dialer

	address  string // of the last resolution
	models   []string
	askAgain time.Time // when to ask for the models again
	noLoad   bool      // it answered /metrics with something else
	noCheck  bool      // it has no health path
}

// NewProber makes the Prober of a server. trustedCA is a PEM file of authorities
// for https, "" for the system's.
func NewProber(s Server, trustedCA string) (*Prober, error) {
	p := &Prober{server: s, dialer: net.Dialer{Timeout: probeTimeout}}
	tr := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return p.dialer.DialContext(ctx, network, p.address)
		},
		MaxIdleConns: 2, IdleConnTimeout: 4 * time.Second, // before the server's own 5 s
	}
	if s.TLS && trustedCA != "" {
		pem, err := os.ReadFile(trustedCA)
		if err != nil {
			return nil, fmt.Errorf("authorities of %s: %w", s.ID, err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("authorities of %s: %s holds no certificate", s.ID, trustedCA)
		}
		tr.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	p.client = &http.Client{
		Transport: tr, Timeout: probeTimeout,
		// A redirect would be followed to a server that nobody configured.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return p, nil
}

// Run probes until ctx ends and hands each Observation to found.
func (p *Prober) Run(ctx context.Context, found func(Observation)) {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	defer p.client.CloseIdleConnections()
	for {
		o := p.Probe(ctx)
		if ctx.Err() != nil { // an interrupted probe tells nothing about the server
			return
		}
		found(o)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Probe looks once: does the server answer, which models does it serve, how much
// does it do. It must not be called twice at the same time.
func (p *Prober) Probe(ctx context.Context) Observation {
	addr, err := resolve(ctx, p.server.Host, p.server.Port)
	switch {
	case err == nil:
		p.address = addr
	case p.address == "":
		return Observation{At: time.Now(), Failed: fmt.Sprintf("name lookup: %v", err)}
	} // else the name server is away: the last address has to do
	o := Observation{Address: p.address}
	// A sick server is not asked for more: it has enough to do.
	if err := p.well(ctx); err != nil {
		o.At = time.Now()
		o.Failed, o.Silent = verdict(err)
		return o
	}
	if now := time.Now(); now.After(p.askAgain) {
		if models, err := p.fetchModels(ctx); err == nil {
			p.models, p.askAgain = models, now.Add(modelsEvery)
		}
	}
	o.Models, o.Load, o.At = p.models, p.fetchLoad(ctx), time.Now()
	return o
}

// verdict tells a server that certainly does not work from one that is silent.
func verdict(err error) (failed string, silent bool) {
	// Slowness is no failure: a server under load answers its health path late.
	var status statusError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused", false
	case errors.As(err, &status):
		return status.Error(), false
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return "", true
	}
	return err.Error(), false
}

// statusError is an answer other than 200.
type statusError struct {
	path   string
	status int
}

// Error names path and status, as operators will see it in `kvmesh workers`.
func (e statusError) Error() string { return fmt.Sprintf("%s: status %d", e.path, e.status) }

// well asks the server whether it is.
func (p *Prober) well(ctx context.Context) error {
	if p.server.Check != "off" && !p.noCheck {
		_, err := p.get(ctx, p.server.Check)
		status, answered := errors.AsType[statusError](err)
		if !answered || status.status != http.StatusNotFound && status.status != http.StatusMethodNotAllowed {
			return err
		}
		p.noCheck = true // it has no such path, which says nothing of its health
	}
	// Without a health path any answer is a sign of life.
	_, err := p.get(ctx, "/v1/models")
	if _, answered := errors.AsType[statusError](err); answered {
		return nil
	}
	return err
}

// fetchModels reads the names of /v1/models, in order and each once. Servers that
// want a key for it are served all the same; only their models stay unknown.
func (p *Prober) fetchModels(ctx context.Context) ([]string, error) {
	raw, err := p.get(ctx, "/v1/models")
	if err != nil {
		return nil, err
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read /v1/models: %w", err)
	}
	var out []string
	for _, m := range list.Data {
		if m.ID != "" && !slices.Contains(out, m.ID) {
			out = append(out, m.ID)
		}
	}
	return out, nil
}

// fetchLoad reads /metrics. A server that has none is not asked again, one that was
// slow this time is.
func (p *Prober) fetchLoad(ctx context.Context) *Load {
	if p.noLoad {
		return nil
	}
	raw, err := p.get(ctx, "/metrics")
	if _, answered := errors.AsType[statusError](err); answered {
		p.noLoad = true
	}
	if err != nil {
		return nil
	}
	load, ok := ParseLoad(raw)
	if !ok {
		return nil
	}
	return &load
}

// get reads one page under the server's own name, at the address it resolved to.
func (p *Prober) get(ctx context.Context, path string) ([]byte, error) {
	scheme := "http"
	if p.server.TLS {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+p.server.Hostname()+path, nil)
	if err != nil {
		return nil, err
	}
	res, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	// Read to the end whatever the status, so that the connection is kept.
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxPage))
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, statusError{path, res.StatusCode}
	}
	return raw, nil
}

// resolve turns a host into an ip:port. Of several addresses it takes the first
// in order, IPv4 before IPv6, so that all replicas take the same.
func resolve(ctx context.Context, host, port string) (string, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return net.JoinHostPort(ip.Unmap().String(), port), nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", err
	}
	for i := range ips { // resolvers write IPv4 addresses in IPv6 form
		ips[i] = ips[i].Unmap()
	}
	slices.SortFunc(ips, func(a, b netip.Addr) int {
		return cmp.Or(cmp.Compare(a.BitLen(), b.BitLen()), a.Compare(b))
	})
	if len(ips) == 0 {
		return "", fmt.Errorf("%s has no address", host)
	}
	return net.JoinHostPort(ips[0].String(), port), nil
}
