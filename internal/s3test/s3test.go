// Package s3test runs a real S3 server for a test, on loopback ports: SeaweedFS, one
// process with all its parts.
package s3test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/s3link"
)

// What the server's only user is called.
const (
	AccessKey = "AK"
	SecretKey = "SK"
	Region    = "us-east-1"
)

// Server is one server process. Its methods are for the test's own goroutine.
type Server struct {
	Endpoint string // its URL, the same after a restart

	t    testing.TB
	weed string
	args []string
	cmd  *exec.Cmd
}

// Start runs a server, which ends with the test, and returns its URL. It takes some
// seconds until the server takes the first upload, so the first is to be tried again.
// The test is skipped where there is no weed.
func Start(t testing.TB) (endpoint string) {
	t.Helper()
	return StartServer(t).Endpoint
}

// StartServer is Start for a test that kills the server.
func StartServer(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, weed: find(t)}
	dir := t.TempDir()
	conf := filepath.Join(dir, "s3.json")
	users := `{"identities":[{"name":"t","credentials":[{"accessKey":"` + AccessKey + `","secretKey":"` + SecretKey + `"}],"actions":["Admin","Read","Write","List"]}]}`
	if err := os.WriteFile(conf, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	s.args = []string{
		"server", "-dir", dir, "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-filer", "-s3", "-s3.config", conf,
		"-volume.max", "5", "-master.volumeSizeLimitMB", "64", "-master.telemetry=false", "-s3.port.iceberg", "0", "-s3.port.lance", "0",
	}
	var port string
	for _, part := range []string{"master", "volume", "filer", "s3"} {
		port = freePort(t)
		s.args = append(s.args, "-"+part+".port", port, "-"+part+".port.grpc", freePort(t))
	}
	s.Endpoint = "http://127.0.0.1:" + port
	t.Cleanup(s.Kill)
	s.Start()
	return s
}

// Start starts the server, again after Kill. It keeps its data.
func (s *Server) Start() {
	s.t.Helper()
	s.cmd = exec.Command(s.weed, s.args...)
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
}

// Kill ends the server with SIGKILL and waits until it is gone.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may be dead already
	_ = s.cmd.Wait()         // and then its status says so
	s.cmd = nil
}

// MakeBucket waits until the server takes objects, a minute at most, and makes a bucket
// if there is none.
func (s *Server) MakeBucket(name string) {
	s.t.Helper()
	core, err := s3link.Open(s3link.Config{Endpoint: s.Endpoint, Region: Region, AccessKey: AccessKey, SecretKey: SecretKey})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	for {
		_, err := core.Client.PutObject(ctx, name, "hello", strings.NewReader("x"), 1, minio.PutObjectOptions{})
		if err == nil {
			return
		}
		if minio.ToErrorResponse(err).Code == "NoSuchBucket" {
			_ = core.MakeBucket(ctx, name, minio.MakeBucketOptions{}) // the next upload tells
		}
		select {
		case <-ctx.Done():
			s.t.Fatalf("no server: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// find returns the executable: weed of the system, else the fetched one.
func find(t testing.TB) string {
	t.Helper()
	if path, err := exec.LookPath("weed"); err == nil {
		return path
	}
	cache, err := os.UserCacheDir()
	if err == nil {
		var paths fetch.Paths
		if paths, err = fetch.Locate(fetch.Config{CacheDir: filepath.Join(cache, "kvmesh")}, fetch.S3); err == nil {
			return paths.S3
		}
	}
	t.Skipf("no weed, which serves S3: %v (kvmesh fetch s3)", err)
	return ""
}

func freePort(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
