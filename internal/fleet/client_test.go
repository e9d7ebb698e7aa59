package fleet_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// answer serves one status and body to everything and notes the request.
func answer(t *testing.T, status int, body string) (c *fleet.Client, asked *string) {
	t.Helper()
	asked = new(string)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*asked = r.Method + " " + r.URL.EscapedPath()
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(srv.Close)
	return fleet.NewClient(srv.URL + "/"), asked
}

func TestClient(t *testing.T) {
	c, asked := answer(t, 200, `{"workers":[{"id":"w0","weight":7}]}`)
	ws, err := c.Workers(t.Context())
	if err != nil || len(ws) != 1 || ws[0].ID != "w0" || ws[0].Weight != 7 || *asked != "GET /v1/workers" {
		t.Errorf("Workers: %v, %v, %s", ws, err, *asked)
	}
	c, asked = answer(t, 200, `{"clusters":[{"name":"pool/p","endpoints":[{"id":"w0","status":"HEALTHY"}]}]}`)
	cs, err := c.Clusters(t.Context())
	if err != nil || len(cs) != 1 || cs[0].Endpoints[0].Status != "HEALTHY" || *asked != "GET /v1/clusters" {
		t.Errorf("Clusters: %v, %v, %s", cs, err, *asked)
	}
	c, asked = answer(t, 200, `{"admin":"http://a","gateway":"http://g","pid":7}`)
	if m, err := c.Mesh(t.Context()); err != nil || m != (fleet.MeshView{Admin: "http://a", Gateway: "http://g", PID: 7}) || *asked != "GET /v1/mesh" {
		t.Errorf("Mesh: %v, %v, %s", m, err, *asked)
	}
	c, asked = answer(t, 204, "")
	if err := c.Drain(t.Context(), "10.0.0.1:8000", true); err != nil || *asked != "POST /v1/workers/10.0.0.1:8000/drain" {
		t.Errorf("Drain: %v, %s", err, *asked)
	}
	if err := c.Drain(t.Context(), "a/b?c", false); err != nil || *asked != "DELETE /v1/workers/a%2Fb%3Fc/drain" {
		t.Errorf("undrain: %v, %s", err, *asked)
	}
}

func TestClientErrors(t *testing.T) {
	for _, x := range []struct {
		status  int
		body    string
		message string
	}{
		{404, `{"error":{"message":"no such worker"}}`, "no such worker"},
		{502, `<html>`, "Bad Gateway"},
		{500, ``, "Internal Server Error"},
	} {
		c, _ := answer(t, x.status, x.body)
		_, err := c.Workers(t.Context())
		ae, ok := errors.AsType[*fleet.APIError](err)
		if !ok || ae.Status != x.status || ae.Message != x.message {
			t.Errorf("%d %q: %v", x.status, x.body, err)
		}
	}
	c, _ := answer(t, 200, `{"workers":`)
	if _, err := c.Workers(t.Context()); err == nil {
		t.Error("half an answer was taken")
	}
	if _, err := fleet.NewClient("http://127.0.0.1:1").Clusters(t.Context()); err == nil || !strings.Contains(err.Error(), "list clusters") {
		t.Errorf("nobody there: %v", err)
	}
}

func valid() fleet.Registration {
	return fleet.Registration{ID: "w-0.a:8000", Address: "[::1]:8000", Pool: "p", Incarnation: 1, State: fleet.StateReady}
}

func TestRegistrationValidate(t *testing.T) {
	if err := valid().Validate(); err != nil {
		t.Error(err)
	}
	for _, addr := range []string{"host:1", "127.0.0.1:0", "[fe80::1%eth0]:1", "0.0.0.0:1", "[::]:1", "224.0.0.1:1", "127.0.0.1", ""} {
		r := valid()
		r.Address = addr
		if err := r.Validate(); err == nil {
			t.Errorf("address %q was taken", addr)
		}
	}
	for field, edit := range map[string]func(*fleet.Registration){
		"id":          func(r *fleet.Registration) { r.ID = "" },
		"id: char":    func(r *fleet.Registration) { r.ID = "a/b" },
		"id: want":    func(r *fleet.Registration) { r.ID = strings.Repeat("x", 254) },
		"pool":        func(r *fleet.Registration) { r.Pool = "" },
		"incarnation": func(r *fleet.Registration) { r.Incarnation = 0 },
		"address":     func(r *fleet.Registration) { r.Address = "host:1" },
		"state":       func(r *fleet.Registration) { r.State = "sleeping" },
	} {
		r := valid()
		edit(&r)
		if err := r.Validate(); err == nil || !strings.HasPrefix(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
