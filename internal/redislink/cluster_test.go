package redislink_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

func TestClusterURLs(t *testing.T) {
	for _, good := range []string{"redis://h:7000", "rediss://user:pass@h:7000?addr=h2:7001&addr=h3:7002"} {
		c, err := redislink.OpenCluster(redislink.Config{URL: good})
		if err != nil {
			t.Errorf("%s: %v", good, err)
			continue
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{
		"", "unix:///run/redis.sock", "redis://:hunter2@h/1", "redis://:hunter2@h?addr=nowhere", "redis://:hunter2@h:port", "redis://:hunter2@h?nosuch=1",
	} {
		if c, err := redislink.OpenCluster(redislink.Config{URL: bad}); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", bad, err)
			if c != nil {
				c.Close()
			}
		}
	}
}

// A real cluster: keys lie on all masters, and the client finds them, also where the
// first address that it was given answers nobody.
func TestCluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 15*time.Second)
	url := strings.Replace(cluster.URL(), "?", "?addr="+cluster.Nodes[0].Addr+"&", 1)
	_, rest, _ := strings.Cut(url, "?")
	c, err := redislink.OpenCluster(redislink.Config{URL: "redis://127.0.0.1:1?" + rest})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range 50 {
		key := fmt.Sprintf("key %d", i)
		if err := c.Set(t.Context(), key, i, 0).Err(); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Get(t.Context(), key).Int(); err != nil || got != i {
			t.Fatalf("%d, %v, want %d", got, err, i)
		}
	}
	masters := 0
	err = cluster.Each(t.Context(), func(s *redistest.Server) error {
		n, err := s.Client.DBSize(t.Context()).Result()
		if masters++; n == 0 {
			t.Errorf("%s has no keys", s.Addr)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
