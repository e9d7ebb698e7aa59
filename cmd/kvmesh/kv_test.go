package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
)

// kvScripts are the commands with which scripts make a KV store and spoil it.
func kvScripts() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		// kvfill DIR MODEL BLOCKS [TENANT]: blocks of two tokens and 1000 bytes, and a tail.
		"kvfill": func(ts *testscript.TestScript, _ bool, args []string) {
			n, err := strconv.Atoi(args[2])
			ts.Check(err)
			ts.Check(fillStore(ts.MkAbs(args[0]), args[1], n, strings.Join(args[3:], "")))
		},
		// kvspoil DIR: flip a bit in the payload of one block.
		"kvspoil": func(ts *testscript.TestScript, _ bool, args []string) {
			ts.Check(spoilStore(ts.MkAbs(args[0])))
		},
	}
}

// fillStore puts a chain of blocks of a model and a tenant and a tail into a store.
func fillStore(dir, model string, n int, tenant string) error {
	s, err := dirstore.Open(dirstore.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer s.Close()
	ctx, space := context.Background(), kvcache.NewSpace(model+" weights", []byte(tenant))
	if model != "-" {
		if err := s.Label(ctx, space.Fingerprint, kvcache.Label{Model: model, Text: model + " weights"}); err != nil {
			return err
		}
	}
	parent := space.Root
	for i := range n {
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 2 * i, IDs: []int32{int32(i), 7}}, []kvcache.Part{{Size: 1000}}, make([]byte, 1000))
		if err != nil {
			return err
		}
		if err := s.Put(ctx, f); err != nil {
			return err
		}
		parent = f.Key
	}
	w, err := s.OpenTail(ctx, kvcache.TailSpec{Space: space, Stream: model + tenant, Parent: parent, First: 2 * n})
	if err != nil {
		return err
	}
	defer w.Close()
	return w.Append(kvcache.Range{First: 2 * n, IDs: []int32{9}, Data: []byte("kv")})
}

// spoilStore flips a bit of the payload of one block.
func spoilStore(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "models/*/blocks/*/*"))
	if err != nil {
		return err
	}
	b, err := os.ReadFile(names[0])
	if err != nil {
		return err
	}
	b[len(b)-1] ^= 1
	return os.WriteFile(names[0], b, 0o600)
}

// Long walks say how far they are, and no more than once a second.
func TestProgress(t *testing.T) {
	var out bytes.Buffer
	p := progress{e: &env{stderr: &out}, what: "verified", total: 40}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 31 {
		p.step(now)
		now = now.Add(100 * time.Millisecond)
	}
	if got := out.String(); strings.Count(got, "\n") != 2 || !strings.HasPrefix(got, "verified 12 of about 40\n") {
		t.Errorf("%q", got)
	}
}
