package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// kvTestNode serves a KV node with a disk, and returns its directory and a client of it.
func kvTestNode(t *testing.T, disk kvcache.Store) (dir string, c *kvnode.Client) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	store, err := arena.Open(arena.Config{Dir: dir, Limit: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	below, err := stack.New(stack.Config{Near: store, Far: []stack.Tier{{Name: "nvme", Store: disk}}})
	if err != nil {
		t.Fatal(err)
	}
	epochs, err := kvnode.OpenEpochs(kvnode.EpochConfig{File: filepath.Join(dir, kvnode.EpochsName)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := kvnode.Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- kvnode.NewServer(kvnode.ServerConfig{Store: store, Below: below, Epochs: epochs}).Serve(ctx, l)
	}()
	t.Cleanup(func() {
		stop()
		if err := errors.Join(<-ended, below.Close(), store.Close()); err != nil {
			t.Error(err)
		}
	})
	if c, err = kvnode.Open(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return dir, c
}

// oneBlock makes a block of a model.
func oneBlock(t *testing.T, model string) *kvcache.Frame {
	t.Helper()
	space := kvcache.NewSpace(model, nil)
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{1, 2}}, []kvcache.Part{{Size: 1000}}, make([]byte, 1000))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// slowWalker is a disk that cannot say at once what it has.
type slowWalker struct{ *nvmetier.Store }

// Labels hides that of the disk.
func (slowWalker) Labels() {}

// TestInvalidateBelow: what is only below the memory is dropped by its name and by as many
// digits as are shown, also where the tier has to be looked through for them; the same
// command does it once more.
func TestInvalidateBelow(t *testing.T) {
	for name, hidden := range map[string]bool{"a tier that says what it has": false, "one that is looked through": true} {
		t.Run(name, func(t *testing.T) {
			disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
			if err != nil {
				t.Fatal(err)
			}
			defer disk.Close()
			named, plain := oneBlock(t, "named"), oneBlock(t, "plain")
			if err := errors.Join(disk.Label(t.Context(), named.Fingerprint, kvcache.Label{Model: "gemma"}), disk.Put(t.Context(), named), disk.Put(t.Context(), plain)); err != nil {
				t.Fatal(err)
			}
			var tier kvcache.Store = disk
			if hidden {
				tier = slowWalker{disk}
			}
			dir, _ := kvTestNode(t, tier)
			drop := func(args ...string) (int, string) {
				code, out, errOut := command(t, t.Context(), append([]string{"kv", "invalidate", "--kv-dir", dir}, args...)...)
				return code, out + errOut
			}
			if code, out := drop("--fingerprint", plain.Fingerprint.String()[:16]); code != 0 || !strings.Contains(out, "dropped - ("+plain.Fingerprint.String()[:16]) {
				t.Errorf("by the digits that are shown: %d, %s", code, out)
			}
			if code, out := drop("--fingerprint", "0123456789"); code != 1 || !strings.Contains(out, "kv stat") {
				t.Errorf("what nobody has: %d, %s", code, out)
			}
			if code, out := drop("--model", "nosuch"); code != 1 || !strings.Contains(out, `no KV of a model "nosuch"`) {
				t.Errorf("what nobody has: %d, %s", code, out)
			}
			if hidden {
				return // it does not say names
			}
			if code, out := drop("--model", "gemma"); code != 0 || !strings.Contains(out, "dropped gemma") {
				t.Errorf("by name: %d, %s", code, out)
			}
			for _, f := range []*kvcache.Frame{named, plain} {
				if _, err := disk.Get(t.Context(), f.Ref); !errors.Is(err, kvcache.ErrNotFound) {
					t.Errorf("a block is still on the disk: %v", err)
				}
			}
		})
	}
}

// TestInvalidateAgain: a model that was dropped is known by the name that a worker gave it.
func TestInvalidateAgain(t *testing.T) {
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	dir, c := kvTestNode(t, disk)
	f := oneBlock(t, "m")
	if err := errors.Join(c.Label(t.Context(), f.Fingerprint, kvcache.Label{Model: "m"}), c.Put(t.Context(), f)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dropped m (" + f.Fingerprint.String()[:16] + "): 1 blocks", "dropped m (" + f.Fingerprint.String()[:16] + "): 0 blocks"} {
		if code, out, errOut := command(t, t.Context(), "kv", "invalidate", "--kv-dir", dir, "--model", "m"); code != 0 || !strings.Contains(out, want) {
			t.Errorf("%d, %s%s, want %s", code, out, errOut, want)
		}
	}
}

// TestEpochCommand: what a person mistypes begins no epoch; what the model had is found by how
// it begins; what it never had is taken when that is said.
func TestEpochCommand(t *testing.T) {
	disk, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(t.TempDir(), "nvme")})
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	dir, c := kvTestNode(t, disk)
	first, second, third := "sha256:6f74ab7a"+strings.Repeat("0", 56), "sha256:6f74ab7b"+strings.Repeat("1", 56), "sha256:"+strings.Repeat("2", 64)
	f := oneBlock(t, "m")
	label := kvcache.Label{Model: "gemma-3-270m", Weights: first}
	if err := errors.Join(c.Label(t.Context(), f.Fingerprint, label), c.Put(t.Context(), f)); err != nil {
		t.Fatal(err)
	}
	label.Weights = second
	if err := c.Label(t.Context(), oneBlock(t, "m2").Fingerprint, label); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args string
		code int
		want string // of what is printed
		then string // weights behind it
	}{
		{"--weights " + second[:len(second)-1], 0, second, second}, // begins what it has
		{"--weights sha256:zz", 2, "64 hexadecimal digits", second},
		{"--weights sha256:zz --new", 2, "64 hexadecimal digits", second},
		{"--weights sha256:", 2, "want KIND:HASH", second},
		{"--weights 6f74ab7a", 2, "want KIND:HASH", second},
		{"--weights " + third + "2", 2, "64 hexadecimal digits", second},
		{"--weights sha256:6f74ab7", 2, "7 digits", second},
		{"--weights sha256:6f74ab7 --new", 2, "7 digits", second},
		{"--weights " + third, 1, first, second}, // the error names what is known
		{"--weights other:v1", 1, "never had", second},
		{"--model nosuch --weights " + third, 1, "the models with a record are gemma-3-270m", second},
		{"--new", 2, "give --model and --weights", second},
		{"--weights sha256:6f74ab7a --dry-run", 0, "and no more " + second, second},
		{"--weights " + third + " --new --dry-run -o json", 0, `"before": "` + second, second},
		{"--weights sha256:6f74ab7b --dry-run", 0, "nothing would go", second},
		{"--weights sha256:6f74ab7a…", 0, first, first},
		{"--weights sha256:6F74AB7B", 0, second, second},
		{"--weights sha256:6f74ab7a --dry-run", 0, "would go: " + oneBlock(t, "m2").Fingerprint.String()[:16] + ": 0 blocks", second},
		{"--weights " + third + " --new", 0, third, third},
	} {
		args := append([]string{"kv", "epoch", "--kv-dir", dir}, strings.Fields(tt.args)...)
		if !strings.Contains(tt.args, "--model") && tt.args != "--new" {
			args = append(args, "--model", "gemma-3-270m")
		}
		code, out, errOut := command(t, t.Context(), args...)
		if code != tt.code || !strings.Contains(out+errOut, tt.want) {
			t.Errorf("%s: %d, %s%s; want %d, %s", tt.args, code, out, errOut, tt.code, tt.want)
		}
		list, err := c.Epochs(t.Context())
		if err != nil || len(list) != 1 || list[0].Weights != tt.then {
			t.Fatalf("%s: then %+v, %v", tt.args, list, err)
		}
	}
}
