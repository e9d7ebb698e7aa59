package modelstore

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvmesh/kvmesh/internal/s3link"
	"github.com/kvmesh/kvmesh/internal/s3test"
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
	from := Sources{S3: s3link.Config{Endpoint: srv.URL, Region: "us-east-1", AccessKey: "AK", SecretKey: "hunter2"}}
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
	from := Sources{S3: s3link.Config{Endpoint: s3test.Start(t), Region: s3test.Region, AccessKey: s3test.AccessKey, SecretKey: s3test.SecretKey}}
	core, err := s3link.Open(from.S3)
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
