//go:build unix

package kvrpc

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/kvcache"
)

var (
	valkeyFlag    = flag.String("peer-valkey", "", "valkey-server for BenchmarkChannels (default: the one that kvmesh fetch redis has fetched, or of PATH)")
	memcachedFlag = flag.String("peer-memcached", "memcached", "memcached for BenchmarkChannels")
)

// valkeyPath is where Valkey is; "" = nowhere.
func valkeyPath() string {
	if *valkeyFlag != "" {
		return *valkeyFlag
	}
	if path, err := exec.LookPath("valkey-server"); err == nil {
		return path
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	paths, err := fetch.Locate(fetch.Config{CacheDir: filepath.Join(cache, "kvmesh"), SystemRedis: "-"}, fetch.Redis)
	if err != nil {
		return ""
	}
	return paths.Redis
}

// startOther runs another server until the benchmark ends, and waits until it listens.
func startOther(b *testing.B, path string, args func(port string) []string) (addr string, pid int) {
	for range 20 {
		port := strconv.Itoa(15000 + rand.IntN(17000))
		addr = net.JoinHostPort("127.0.0.1", port)
		cmd := exec.Command(path, args(port)...)
		cmd.Dir = b.TempDir()
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()
		})
		for range 100 {
			c, err := net.Dial("tcp", addr)
			if err == nil {
				c.Close()
				return addr, cmd.Process.Pid
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	b.Fatalf("%s does not listen", path)
	return "", 0
}

// redisContender is go-redis on a server, which checks nothing.
func redisContender(b *testing.B, path string) contender {
	if path == "" {
		return contender{}
	}
	addr, pid := startOther(b, path, func(port string) []string {
		return []string{"--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"}
	})
	c := redis.NewClient(&redis.Options{Addr: addr, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	b.Cleanup(func() { c.Close() })
	key := func(f *kvcache.Frame) string { return string(f.Key[:]) }
	return contender{
		pid: pid,
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

// memcachedContender is memcached with a client that does no more than it must: it sends
// from where the bytes lie and reads into memory that is used again. It checks nothing.
func memcachedContender(b *testing.B) contender {
	path, err := exec.LookPath(*memcachedFlag)
	if err != nil {
		return contender{}
	}
	addr, pid := startOther(b, path, func(port string) []string {
		return []string{"-l", "127.0.0.1", "-p", port, "-m", "4096", "-I", "512m", "-u", "root"}
	})
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { nc.Close() })
	r := bufio.NewReaderSize(nc, 4<<10)
	room := make([]byte, 65<<20)
	line := func(want string) error {
		got, err := r.ReadString('\n')
		if err == nil && got != want+"\r\n" {
			err = fmt.Errorf("memcached says %.100q", got)
		}
		return err
	}
	return contender{
		pid: pid,
		put: func(_ context.Context, f *kvcache.Frame) error {
			bufs := net.Buffers{fmt.Appendf(nil, "set %v 0 0 %d\r\n", f.Key, f.Total), f.Bytes(), []byte("\r\n")}
			if _, err := bufs.WriteTo(nc); err != nil {
				return err
			}
			return line("STORED")
		},
		get: func(_ context.Context, f *kvcache.Frame) error {
			if _, err := fmt.Fprintf(nc, "get %v\r\n", f.Key); err != nil {
				return err
			}
			if err := line(fmt.Sprintf("VALUE %v 0 %d", f.Key, f.Total)); err != nil {
				return err
			}
			if _, err := io.ReadFull(r, room[:f.Total]); err != nil {
				return err
			}
			if err := line(""); err != nil {
				return err
			}
			return line("END")
		},
		clear: func(context.Context, *kvcache.Frame) error {
			if _, err := io.WriteString(nc, "flush_all\r\n"); err != nil {
				return err
			}
			return line("OK")
		},
	}
}
