package main

import (
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Streams are shared where the policy says so, with a secret only, and no error tells the
// password of the store.
func TestSharedStreams(t *testing.T) {
	env := func(url string) func(string) string {
		return func(name string) string {
			if name == "REDIS_URL" {
				return url
			}
			return ""
		}
	}
	set := &policy.Set{}
	set.Mesh.Registry.Redis = "redis://127.0.0.1:1"
	if c, err := sharedStreams(set, env(""), "", "secret"); c != nil || err != nil {
		t.Errorf("not asked for: %v, %v", c, err)
	}
	set.Mesh.ShareStreams = true
	if _, err := sharedStreams(set, env(""), "", ""); err == nil || !strings.Contains(err.Error(), "KVMESH_RELAY_SECRET") {
		t.Errorf("without a secret: %v", err)
	}
	if _, err := sharedStreams(set, env("redis://:hunter2%zz@h"), "", "secret"); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a bad URL: %v", err)
	}
	c, err := sharedStreams(set, env("redis://:pw@127.0.0.1:2/3"), "", "secret")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if o := c.Options(); o.Addr != "127.0.0.1:2" || o.Password != "pw" || o.DB != 3 {
		t.Errorf("REDIS_URL is not the one that is used: %s", o.Addr)
	}
}
