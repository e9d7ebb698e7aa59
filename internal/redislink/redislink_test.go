package redislink_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
)

func TestURLs(t *testing.T) {
	for _, good := range []string{
		"redis://127.0.0.1:6379", "redis://h", "rediss://user:pass@h:6380/2", "unix:///run/redis.sock", "redis://:p%40ss@[::1]:7/1",
	} {
		if err := (redislink.Config{URL: good}).Validate(); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{
		"", "h:6379", "http://user:hunter2@h", "redis://user:hunter2@h:port", "redis://user:hunter2@h/x", "redis://:hunter2%zz@h",
		"redis://:hunter2@h?nosuch=1", "redis://", "rediss://", "rediss://user:hunter2@", "rediss://:6380", "redis:///1",
	} {
		err := redislink.Config{URL: bad}.Validate()
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", bad, err)
		}
		if _, oerr := redislink.Open(redislink.Config{URL: bad}); oerr == nil {
			t.Errorf("%s was opened", bad)
		}
	}
}

func TestShownHasNoSecret(t *testing.T) {
	for url, want := range map[string]string{
		"rediss://user:hunter2@h:6380/2?x=hunter2": "rediss://h:6380/2",
		"redis://:hunter2%zz@h":                    "redis",
		"redis://h":                                "redis://h",
	} {
		if got := (redislink.Config{URL: url}).Shown(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestTrustedCA(t *testing.T) {
	for name, content := range map[string]string{"missing.pem": "", "empty.pem": "no certificate"} {
		path := filepath.Join(t.TempDir(), name)
		if content != "" {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := (redislink.Config{URL: "rediss://h", TrustedCA: path}).Validate(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if err := (redislink.Config{URL: "redis://h", TrustedCA: path}).Validate(); err != nil {
			t.Errorf("%s without TLS: %v", name, err)
		}
	}
}

// A server that is not there or does not answer costs no more than it may, and the
// error tells no password.
func TestNobodyWaits(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String() // takes connections and says nothing
	defer ln.Close()
	for _, where := range []string{"127.0.0.1:1", addr} {
		c, err := redislink.Open(redislink.Config{URL: "redis://user:hunter2@" + where})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err = c.Ping(ctx).Err()
		if err == nil || strings.Contains(err.Error(), "hunter2") || ctx.Err() != nil {
			t.Errorf("%s: %v", where, err)
		}
		cancel()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
