package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// registry checks where workers are found. Messages never repeat the URL: it may
// hold a password.
func (p *parser) registry(r *Registry, at Place) {
	if r.Redis != "" {
		u, err := url.Parse(r.Redis)
		known := err == nil && slices.Contains([]string{"redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix"}, u.Scheme)
		if !known || u.Host == "" && u.Scheme != "unix" || u.Path == "" && u.Scheme == "unix" {
			p.wrong(at, "registry.redis", "registry.redis: want redis://HOST:PORT, rediss://HOST:PORT for TLS, redis+sentinel://HOST:PORT/MASTER, or unix:///PATH")
		}
	}
	if r.AddressTemplate != "" && r.Redis == "" {
		p.wrong(at, "registry.addressTemplate", "registry.addressTemplate needs registry.redis")
	}
	r.AddressTemplate = cmp.Or(r.AddressTemplate, "worker-{worker_id}:8000")
	host, port, err := net.SplitHostPort(r.AddressTemplate)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || !strings.Contains(host, "{worker_id}") {
		p.wrong(at, "registry.addressTemplate", "registry.addressTemplate %q: want host:port with {worker_id} in the host, for example worker-{worker_id}:8000", r.AddressTemplate)
	}
}

// ListenAddress checks an address to listen on: ip:port, with localhost for the
// loopback address and 0 for a free port. It returns it with the IP address.
func ListenAddress(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
		return "", fmt.Errorf("%q: want ip:port, for example 127.0.0.1:8080", addr)
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "", fmt.Errorf("%q: %q is no IP address", addr, host)
	}
	return net.JoinHostPort(host, port), nil
}

// ServerURL checks the URL of an existing server: http or https, a host, and a port
// where it is not the scheme's own. It may end in /v1; everything else that a URL can
// have would be left unused, and is refused. The error repeats no password.
func ServerURL(text string) (*url.URL, error) {
	shown := text
	if at := strings.LastIndex(text, "@"); at >= 0 { // what is before it may be secret
		shown = "…" + text[at:]
	}
	fail := func(format string, args ...any) (*url.URL, error) {
		return nil, fmt.Errorf("%q: %s", shown, fmt.Sprintf(format, args...))
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return fail("want http://HOST:PORT, with a port of 1 to 65535")
	}
	port := u.Port()
	if n, err := strconv.ParseUint(port, 10, 16); strings.HasSuffix(u.Host, ":") || port != "" && (err != nil || n == 0) {
		return fail("port %q: want 1 to 65535", port)
	}
	switch {
	case u.User != nil:
		return fail("user and password are not supported: clients send their own Authorization")
	case u.RawQuery != "" || u.ForceQuery || strings.Contains(text, "#"):
		return fail("a query or fragment is not supported: want http://HOST:PORT")
	case !slices.Contains([]string{"", "/", "/v1", "/v1/"}, u.Path):
		return fail("a path is not supported, other than /v1: want http://HOST:PORT")
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil {
		if err := ConnectAddress(ip); err != nil {
			return fail("%v", err)
		}
	}
	return u, nil
}

// ConnectAddress says why Envoy cannot connect to an IP address. It refuses a whole
// pool for one such.
func ConnectAddress(ip netip.Addr) error {
	switch {
	case ip.Zone() != "":
		return fmt.Errorf("the address %v has an interface, which Envoy does not take", ip)
	case ip.Unmap().IsUnspecified():
		return fmt.Errorf("the address %v is no host's: want 127.0.0.1 for this one", ip)
	case ip.IsMulticast():
		return fmt.Errorf("the address %v is no host's", ip)
	case ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return errors.New("the broadcast address is no host's")
	}
	return nil
}

// visible reports whether s is made of ASCII characters that one can see.
func visible(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c >= 0x7f })
}

// validServer reports whether an id can name a server in headers and URLs.
func validServer(id string) bool { return len(id) <= 253 && visible(id) && !strings.Contains(id, "/") }

// fixedPort is a port that the policy fixes.
type fixedPort struct {
	name string // "listen.api" or the worker
	addr netip.AddrPort
	doc  Place // where it is said
	path string
}

// fixedPorts lists the ports of this machine that are not free ones.
func (s *Set) fixedPorts() []fixedPort {
	var out []fixedPort
	l := s.Mesh.Listen
	for _, f := range []struct{ name, addr string }{{"openai", l.OpenAI}, {"admin", l.Admin}, {"api", l.API}, {"metrics", l.Metrics}} {
		if a, err := netip.ParseAddrPort(f.addr); err == nil && a.Port() != 0 {
			out = append(out, fixedPort{"listen." + f.name, a, s.Mesh.At, "listen." + f.name})
		}
	}
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1}) // where local workers listen
	for _, w := range s.Pools {
		for i, l := range w.Local {
			if l.Port > 0 && l.Port <= 65535 {
				a := netip.AddrPortFrom(loopback, uint16(l.Port))
				out = append(out, fixedPort{"worker " + l.ID, a, w.At, fmt.Sprintf("local[%d].port", i)})
			}
		}
	}
	return out
}

// clashes reports whether two listeners cannot have both their addresses.
func (f fixedPort) clashes(o fixedPort) bool {
	a, b := f.addr.Addr().Unmap(), o.addr.Addr().Unmap()
	return f.addr.Port() == o.addr.Port() && (a == b || a.IsUnspecified() || b.IsUnspecified())
}

// PortTwice returns two listeners of the set that want the same port, in order; ok is
// false when there are none. Parse leaves none.
func (s *Set) PortTwice() (first, second string, ok bool) {
	for _, two := range s.portsTwice() {
		return two[0].name, two[1].name, true
	}
	return "", "", false
}

// portsTwice lists each listener whose port an earlier one has, after that.
func (s *Set) portsTwice() (out [][2]fixedPort) {
	ports := s.fixedPorts()
	for i, b := range ports {
		if at := slices.IndexFunc(ports[:i], b.clashes); at >= 0 {
			out = append(out, [2]fixedPort{ports[at], b})
		}
	}
	return out
}
