package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Every command line of README.md names a command and flags that exist, and its
// policies parse.
func TestReadme(t *testing.T) {
	data, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(`(?m)bin/kvmesh ([^\n|)]*)`).FindAllStringSubmatch(string(data), -1)
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
	pool := policy.File{Name: "pool", Data: []byte("apiVersion: kvmesh.io/v1alpha1\nkind: WorkerPool\nmetadata: {name: gemma}\nspec: {engine: sim, model: m}\n")}
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(data), -1) {
		if _, err := policy.Parse(pool, policy.File{Name: "README.md", Data: []byte(block[1])}); err != nil {
			t.Errorf("%v", err)
		}
	}
}
