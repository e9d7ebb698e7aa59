package rivaltest

import (
	"bytes"
	"context"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestRivals stores and reads through each server that is installed, on both networks.
func TestRivals(t *testing.T) {
	value := bytes.Repeat([]byte("x"), 3<<20)
	for _, network := range []string{"tcp", "unix"} {
		for name, path := range map[string]string{"redis": Redis(), "valkey": Valkey("")} {
			s := StartRedis(t, path, network)
			if s == nil {
				t.Logf("%s: not installed", name)
				continue
			}
			c := redis.NewClient(&redis.Options{Network: s.Network, Addr: s.Addr})
			defer c.Close()
			if err := c.Set(context.Background(), "k", value, 0).Err(); err != nil {
				t.Fatal(err)
			}
			if got, err := c.Get(context.Background(), "k").Bytes(); err != nil || !bytes.Equal(got, value) {
				t.Errorf("%s by %s: %d bytes, %v", name, network, len(got), err)
			}
		}
		s := StartMemcached(t, "memcached", network)
		if s == nil {
			t.Log("memcached: not installed")
			continue
		}
		m := DialMemcached(t, s)
		for _, key := range []string{"a", "b"} {
			if err := m.Set(key, value); err != nil {
				t.Fatal(err)
			}
		}
		room, n := make([]byte, len(value)), 0
		if err := m.Get([]string{"a", "b"}, room, func() { n++ }); err != nil || n != 2 || !bytes.Equal(room, value) {
			t.Errorf("memcached by %s: %d values, %v", network, n, err)
		}
		if err := m.Clear(); err != nil {
			t.Error(err)
		}
		if m.Get([]string{"a"}, room, nil) == nil {
			t.Error("memcached has a value that was cleared")
		}
	}
}
