package xds

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/fleet/fleetpb"
	"github.com/kvmesh/kvmesh/internal/health"
)

// The socket appears ready and with its mode, in place of a dead one.
func TestListen(t *testing.T) {
	dir, err := os.MkdirTemp("", "kvm")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	for range 2 { // the second time there is one already
		ln, err := listen(path)
		if err != nil {
			t.Fatal(err)
		}
		fi, err := os.Stat(path)
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Fatalf("mode %v, %v", fi.Mode().Perm(), err)
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".x*")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := listen(filepath.Join(dir, "no", "s")); err == nil {
		t.Error("no error without a directory")
	}
	if ln, err := listen("127.0.0.1:0"); err != nil {
		t.Error(err)
	} else {
		_ = ln.Close()
	}
}

// ads runs a server on a socket and returns a stream to it.
func ads(t *testing.T, s *server) (discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvm")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	ln, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	go func() { done <- serveADS(ctx, ln, s.mux(), s.callbacks()) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		<-done
		_ = os.RemoveAll(dir)
	})
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream, path
}

func built(t *testing.T, connect string) envoy.Resources {
	t.Helper()
	set := policies(t, "a")
	if connect != "" {
		set.Pools[0].Connect *= 3
	}
	r, err := envoy.Build(envoy.Config{Policy: set, Edge: "127.0.0.1:1", Egress: "/e", Relay: "/r", ExtProc: "/x"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ask subscribes to a type and returns the names of the first answer.
func ask(t *testing.T, st discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient, typeURL string, known map[string]string, subscribe ...string) (*discoveryv3.DeltaDiscoveryResponse, string) {
	t.Helper()
	if err := st.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: typeURL, ResourceNamesSubscribe: subscribe, InitialResourceVersions: known,
	}); err != nil {
		t.Fatal(err)
	}
	m, err := st.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range m.GetResources() {
		names = append(names, r.GetName())
	}
	return m, strings.Join(names, " ")
}

// Another server with the same content resends nothing to a client that comes
// over: versions are hashes.
func TestVersionsAreContent(t *testing.T) {
	eps := []envoy.Endpoint{{Worker: "w", Address: "127.0.0.1:1", Status: health.Healthy, Weight: 7}}
	replica := func(weight uint32) *server {
		s := newServer(slog.New(slog.DiscardHandler), newMetrics())
		r := built(t, "")
		s.expect(r.Clusters)
		if err := s.configure(r); err != nil {
			t.Fatal(err)
		}
		e := eps[0]
		e.Weight = weight
		s.setEndpoints("a", []envoy.Endpoint{e})
		return s
	}
	service := clusterNamed(t, built(t, ""), "pool/a").GetEdsClusterConfig().GetServiceName()
	one, _ := ads(t, replica(7))
	m, got := ask(t, one, resource.EndpointType, nil, service)
	if got != service {
		t.Fatalf("endpoints %q, want %q", got, service)
	}
	known := map[string]string{service: m.GetResources()[0].GetVersion()}
	_, clusters := ask(t, one, resource.ClusterType, nil, "*")
	if len(strings.Fields(clusters)) != 3 {
		t.Errorf("clusters %q", clusters)
	}

	// The same content: the next thing this client hears is something else.
	two, _ := ads(t, replica(7))
	if err := two.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: resource.EndpointType, ResourceNamesSubscribe: []string{service}, InitialResourceVersions: known,
	}); err != nil {
		t.Fatal(err)
	}
	if m, _ := ask(t, two, resource.ClusterType, nil, "*"); m.GetTypeUrl() != resource.ClusterType && len(m.GetResources()) != 0 {
		t.Errorf("the same endpoints were sent again: %v", m)
	}
	three, _ := ads(t, replica(8))
	if _, got := ask(t, three, resource.EndpointType, known, service); got != service {
		t.Errorf("other endpoints were not sent: %q", got)
	}
}

func clusterNamed(t *testing.T, r envoy.Resources, name string) *clusterv3.Cluster {
	t.Helper()
	for _, c := range r.Clusters {
		if c.GetName() == name {
			return c
		}
	}
	t.Fatalf("no cluster %s", name)
	return nil
}

// After a change of the cluster its endpoints are there under the new name, and
// for Envoys that have not followed yet under the old; a name two changes old is
// gone.
func TestServiceNames(t *testing.T) {
	s := newServer(slog.New(slog.DiscardHandler), newMetrics())
	name := func(r envoy.Resources) string {
		s.expect(r.Clusters)
		s.setEndpoints("a", nil)
		return clusterNamed(t, r, "pool/a").GetEdsClusterConfig().GetServiceName()
	}
	first, second := name(built(t, "")), name(built(t, "other"))
	if first == second {
		t.Fatal("a changed cluster kept its service name")
	}
	has := func(n string) bool { _, ok := s.endpoints.GetResources()[n]; return ok }
	if !has(first) || !has(second) {
		t.Errorf("after one change: old %v, new %v", has(first), has(second))
	}
	name(built(t, "other")) // the same again
	if !has(first) || !has(second) {
		t.Errorf("after no change: old %v, new %v", has(first), has(second))
	}
	third := built(t, "")
	clusterNamed(t, third, "pool/a").EdsClusterConfig.ServiceName = "pool/a@third"
	name(third)
	if has(first) || !has(second) || !has("pool/a@third") {
		t.Errorf("after two changes: oldest %v, old %v, new %v", has(first), has(second), has("pool/a@third"))
	}
}

// A refusal is counted, a type we have nothing of ends no stream.
func TestRefusalsAndUnknownTypes(t *testing.T) {
	m := newMetrics()
	s := newServer(slog.New(slog.DiscardHandler), m)
	if err := s.configure(built(t, "")); err != nil {
		t.Fatal(err)
	}
	st, _ := ads(t, s)
	if err := st.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resource.SecretType, ResourceNamesSubscribe: []string{"x"}}); err != nil {
		t.Fatal(err)
	}
	r, got := ask(t, st, resource.ListenerType, nil, "*")
	if got != "edge egress" && got != "egress edge" {
		t.Errorf("listeners %q", got)
	}
	if err := st.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: resource.ListenerType, ResponseNonce: r.GetNonce(), ErrorDetail: &rpcstatus.Status{Message: "no"},
	}); err != nil {
		t.Fatal(err)
	}
	ask(t, st, resource.ClusterType, nil, "*") // the server reads in order
	if n := testutil.ToFloat64(m.nacks.WithLabelValues("Listener")); n != 1 {
		t.Errorf("%v refusals counted", n)
	}
	if n := testutil.ToFloat64(m.streams); n != 1 {
		t.Errorf("%v streams counted", n)
	}
}

// The snapshot holds what Envoy needs, and a damaged one is refused whole.
func TestSnapshotFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "snapshot.pb")
	s := newServer(slog.New(slog.DiscardHandler), newMetrics())
	r := built(t, "")
	s.expect(r.Clusters)
	if err := s.configure(r); err != nil {
		t.Fatal(err)
	}
	s.setEndpoints("a", []envoy.Endpoint{{Worker: "w", Address: "127.0.0.1:1", Status: health.Healthy, Weight: 7}})
	s.setFleet([]*fleetpb.Worker{{Id: "w"}}, nil)
	if err := s.writeSnapshot(path); err != nil {
		t.Fatal(err)
	}
	standin := func() *snapshotServer {
		log := slog.New(slog.NewTextHandler(io.Discard, nil))
		return &snapshotServer{config: SnapshotConfig{Path: path, Log: log}, server: newServer(log, newMetrics())}
	}
	in := standin()
	if err := in.load(); err != nil {
		t.Fatal(err)
	}
	st, _ := ads(t, in.server)
	service := clusterNamed(t, r, "pool/a").GetEdsClusterConfig().GetServiceName()
	if _, got := ask(t, st, resource.EndpointType, nil, service); got != service {
		t.Errorf("endpoints %q", got)
	}
	if _, got := ask(t, st, resource.RouteType, nil, "edge"); got != "edge" {
		t.Errorf("routes %q", got)
	}

	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, raw := range map[string][]byte{"empty": nil, "cut": whole[:len(whole)/2], "noise": []byte("\x0a\xffnoise")} {
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := standin().load(); err == nil {
			t.Errorf("%s: taken for a snapshot", name)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := standin().load(); err == nil {
		t.Error("no file, and no error")
	}
}

// A process that takes connections but does not answer is not back.
func TestAnswers(t *testing.T) {
	s := newServer(slog.New(slog.DiscardHandler), newMetrics())
	_, path := ads(t, s)
	if !answers(t.Context(), path) {
		t.Error("a server that serves does not answer")
	}
	dir, err := os.MkdirTemp("", "kvm")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	hung, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if answers(ctx, hung.Addr().String()) || answers(ctx, filepath.Join(dir, "none")) {
		t.Error("a process that hangs, or none at all, answers")
	}
}
