//go:build unix

package kvrpc

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/rivaltest"
	"github.com/kvmesh/kvmesh/kvcache"
)

var (
	valkeyFlag    = flag.String("peer-valkey", "", "valkey-server for BenchmarkChannels (default: the one that kvmesh fetch redis has fetched, or of PATH)")
	memcachedFlag = flag.String("peer-memcached", "memcached", "memcached for BenchmarkChannels")
)

// redisContender is go-redis on a server, which checks nothing.
func redisContender(b *testing.B, path string) contender {
	s := rivaltest.StartRedis(b, path, "tcp")
	if s == nil {
		return contender{}
	}
	c := redis.NewClient(&redis.Options{Addr: s.Addr, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	b.Cleanup(func() { c.Close() })
	key := func(f *kvcache.Frame) string { return string(f.Key[:]) }
	return contender{
		pid: s.Pid,
		put: func(ctx context.Context, f *kvcache.Frame) error { return c.Set(ctx, key(f), f.Bytes(), 0).Err() },
		get: func(ctx context.Context, f *kvcache.Frame) error {
			got, err := c.Get(ctx, key(f)).Bytes()
			if err == nil && int64(len(got)) != f.Total {
				err = fmt.Errorf("%d bytes", len(got))
			}
			return err
		},
		clear: func(ctx context.Context, _ *kvcache.Frame) error { return c.FlushAll(ctx).Err() },
	}
}

// memcachedContender is memcached with a client that only moves bytes. It checks nothing.
func memcachedContender(b *testing.B) contender {
	s := rivaltest.StartMemcached(b, *memcachedFlag, "tcp")
	if s == nil {
		return contender{}
	}
	m := rivaltest.DialMemcached(b, s)
	room := make([]byte, 65<<20)
	return contender{
		pid: s.Pid,
		put: func(_ context.Context, f *kvcache.Frame) error { return m.Set(f.Key.String(), f.Bytes()) },
		get: func(_ context.Context, f *kvcache.Frame) error {
			return m.Get([]string{f.Key.String()}, room[:f.Total], nil)
		},
		clear: func(context.Context, *kvcache.Frame) error { return m.Clear() },
	}
}
