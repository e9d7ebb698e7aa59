package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Every command line of README.md names a command and flags that exist, and its
// policies parse.
func TestReadme(t *testing.T) {
	data, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile("(?m)bin/kvmesh ([^\n|)`]*)").FindAllStringSubmatch(string(data), -1)
	if len(lines) < 6 {
		t.Fatalf("only %d command lines found", len(lines))
	}
	for _, m := range lines {
		text, _, _ := strings.Cut(m[1], "#")
		root := newRoot(&env{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard, getenv: func(string) string { return "" }})
		c, rest, err := root.Find(strings.Fields(text))
		if err != nil || c == root {
			t.Errorf("README.md: `kvmesh %s`: no such command: %v", text, err)
			continue
		}
		if err := c.ParseFlags(rest); err != nil {
			t.Errorf("README.md: `kvmesh %s`: %v", text, err)
		}
	}
	checkReadme(t, string(data))
	pool := policy.File{Name: "pool", Data: []byte("apiVersion: kvmesh.io/v1alpha1\nkind: WorkerPool\nmetadata: {name: gemma}\nspec: {engine: sim, model: m}\n")}
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(data), -1) {
		if _, err := policy.Parse(pool, policy.File{Name: "README.md", Data: []byte(block[1])}); err != nil {
			t.Errorf("%v", err)
		}
	}
}

// checkReadme holds README.md against what it speaks of: the files it links to and
// the size that doctor announces.
func checkReadme(t *testing.T, text string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)\)`).FindAllStringSubmatch(text, -1) {
		if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
			t.Errorf("README.md: dead link: %v", err)
		}
	}
	_, items, err := fetch.Plan(fetch.Config{CacheDir: t.TempDir(), OS: "linux", Arch: "amd64"}, fetch.Envoy, fetch.Llama, fetch.Model)
	if err != nil {
		t.Fatal(err)
	}
	var bytes int64
	for _, it := range items {
		bytes += it.Download
	}
	if want := fmt.Sprintf("fetches %.0f MB", float64(bytes)/1e6); !strings.Contains(text, want) {
		t.Errorf("README.md does not say that the first run %s", want)
	}
}
