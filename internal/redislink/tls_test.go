package redislink_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

// unwrap listens with TLS and passes what is in it on to a server. Not every build of
// a server speaks TLS itself.
func unwrap(t *testing.T, to, cert, key string) (addr string) {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	lis, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				up, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer up.Close()
				go func() { _, _ = io.Copy(c, up) }() // ends with the connection
				_, _ = io.Copy(up, c)
			}()
		}
	}()
	return lis.Addr().String()
}

// rediss:// speaks TLS to a server of the given authority, and to no other.
func TestTLS(t *testing.T) {
	cert, key := redistest.Certificate(t)
	addr := unwrap(t, redistest.Start(t).Addr, cert, key)
	ping := func(c redislink.Config) error {
		client, err := redislink.Open(c)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		return client.Ping(t.Context()).Err()
	}
	if err := ping(redislink.Config{URL: "rediss://" + addr, TrustedCA: cert}); err != nil {
		t.Error(err)
	}
	if err := ping(redislink.Config{URL: "rediss://" + addr}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown authority: %v", err)
	}
	if err := ping(redislink.Config{URL: "redis://" + addr}); err == nil {
		t.Error("spoke plain text to a TLS port")
	}
}

// TestClientCertificate: a real server with TLS takes who has a certificate and, for what its
// ACL allows, the user with the right password.
func TestClientCertificate(t *testing.T) {
	cert, key := redistest.Certificate(t)
	_, addr := redistest.StartTLS(t, cert, key, "--user", "kv", "on", ">hunter2", "~kv:*", "+get", "+set", "+ping")
	do := func(user string, files url.Values) error {
		client, err := redislink.Open(redislink.Config{URL: "rediss://" + user + addr + "?" + files.Encode()})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		return client.Set(t.Context(), "kv:a", 1, 0).Err()
	}
	all := url.Values{"ca": {cert}, "cert": {cert}, "key": {key}}
	if err := do("kv:hunter2@", all); err != nil {
		t.Error(err)
	}
	if err := do("kv:hunter3@", all); err == nil || strings.Contains(err.Error(), "hunter") {
		t.Errorf("a wrong password: %v", err)
	}
	if err := do("kv:hunter2@", url.Values{"ca": {cert}}); err == nil {
		t.Error("a client without a certificate was let in")
	}
	if err := do("kv:hunter2@", url.Values{"cert": {cert}, "key": {key}}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of an unknown authority: %v", err)
	}
	client, err := redislink.Open(redislink.Config{URL: "rediss://kv:hunter2@" + addr + "?" + all.Encode()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.Set(t.Context(), "other", 1, 0).Err(); err == nil || !strings.Contains(err.Error(), "NOPERM") {
		t.Errorf("a key of others: %v", err)
	}
	for _, bad := range []string{"rediss://h?cert=" + cert, "rediss://h?key=" + key, "rediss://h?cert=nosuch&key=nosuch", "redis://h?cert=" + cert + "&key=" + key} {
		if err := (redislink.Config{URL: bad}).Validate(); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}

// TestSentinelURLs: what is said is kept, and no error tells a password.
func TestSentinelURLs(t *testing.T) {
	for _, good := range []string{
		"redis+sentinel://h/kv", "rediss+sentinel://u:p@h:1/kv?addr=i:2&addr=j:3&db=2&sentinel_user=a&sentinel_password=b", "redis+sentinel://[::1]:7/kv",
	} {
		if err := (redislink.Config{URL: good}).Validate(); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{
		"redis+sentinel://h", "redis+sentinel://h/", "redis+sentinel:///kv", "http+sentinel://:hunter2@h/kv", "redis+sentinel://:hunter2@h/kv/1",
		"redis+sentinel://:hunter2@h/kv?addr=nowhere", "redis+sentinel://h/kv?sentinel_password=hunter2&nosuch=1", "redis+sentinel://:hunter2@h/kv?db=x",
	} {
		if err := (redislink.Config{URL: bad}).Validate(); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if got := (redislink.Config{URL: "rediss+sentinel://u:hunter2@h:1/kv?sentinel_password=hunter2"}).Shown(); got != "rediss+sentinel://h:1/kv" {
		t.Errorf("%q", got)
	}
}

// TestSentinel: the client goes where a real Sentinel says that the master is, also after
// that has died.
func TestSentinel(t *testing.T) {
	w := redistest.StartSentinel(t, time.Second)
	client, err := redislink.Open(redislink.Config{URL: strings.Replace(w.URL(), "/"+redistest.MasterName, "/"+redistest.MasterName+"?addr=127.0.0.1:1", 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.Set(t.Context(), "a", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	w.Master.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for client.Set(ctx, "b", 2, 0).Err() != nil {
		if ctx.Err() != nil {
			t.Fatal("nothing was written after the master's death")
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	if n, err := w.Replica.Client.Get(ctx, "b").Int(); err != nil || n != 2 {
		t.Errorf("the replica has %d, %v", n, err)
	}
}
