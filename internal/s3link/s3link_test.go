package s3link_test

import (
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/s3link"
)

func TestEndpoints(t *testing.T) {
	for endpoint, want := range map[string]string{
		"": "https://s3.amazonaws.com", "http://127.0.0.1:9000": "http://127.0.0.1:9000", "https://s3.example/": "https://s3.example",
	} {
		core, err := s3link.Open(s3link.Config{Endpoint: endpoint, AccessKey: "AK", SecretKey: "SK"})
		if err != nil {
			t.Errorf("%s: %v", endpoint, err)
		} else if got := core.EndpointURL().String(); got != want {
			t.Errorf("%q leads to %s, want %s", endpoint, got, want)
		}
	}
	for _, bad := range []string{"127.0.0.1:9000", "ftp://h", "http://", "http://h/path", "http://u:hunter2@h:port", "://"} {
		c := s3link.Config{Endpoint: bad}
		if _, err := s3link.Open(c); err == nil || c.Validate() == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
