package e2e

import (
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/internal/s3test"
)

// kv runs `kvmesh kv` on the node, and says how it ended.
func (n *kvNode) kv(to any, args ...string) (stderr string, code int) {
	n.Helper()
	cmd := exec.Command(bin, append(append([]string{"kv"}, args...), "-o", "json", "--kv-dir", n.dir)...)
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		stderr, code = string(exit.Stderr), exit.ExitCode()
	} else if err != nil {
		n.Fatal(err)
	}
	if err := json.Unmarshal(out, to); err != nil {
		n.Fatalf("kv %v: %v, %s%s", args, err, out, stderr)
	}
	return stderr, code
}

// statOut and verifyOut are what the commands say of each tier.
type (
	statOut struct {
		Tiers []struct {
			Tier   string
			Models []struct {
				Model  string
				Blocks int
				Tokens int
			}
			Hosts []struct {
				ID   string
				Used int64 `json:"used_bytes"`
			}
			Error string
		}
	}
	verifyOut struct {
		Tiers []struct {
			Tier     string
			Verified int
			Bad      int `json:"bad_blocks"`
			Missing  int
			Error    string
		}
	}
)

// TestSurveyTiers: stat and verify of a running node look at its memory, its disk, Redis, S3
// and the copies on another host. What is spoiled in Redis is found, named and removed, and a
// server that is away is said to be, beside what the others have.
func TestSurveyTiers(t *testing.T) {
	t.Parallel()
	server, bucket := redistest.Start(t), s3test.StartServer(t)
	bucket.MakeBucket("kvblocks")
	at := []string{freeAddr(t), freeAddr(t)}
	all := "a=east@" + at[0] + ",b=west@" + at[1]
	node := startNode(t, "--peer-listen", at[0], "--id", "a", "--peers", all, "--nvme", filepath.Join(t.TempDir(), "kv"),
		"--redis", server.URL(), "--redis-single", "--s3", "s3://kvblocks/survey", "--s3-endpoint", bucket.Endpoint)
	startNode(t, "--peer-listen", at[1], "--id", "b", "--peers", all)
	longQuestion(t, simProcess(t, "p", "--kv-node", node.dir))
	node.settled(time.Minute)

	var stat statOut
	if stderr, code := node.kv(&stat, "stat"); code != 0 || len(stat.Tiers) != 5 {
		t.Fatalf("stat: %+v\n%s", stat, stderr)
	}
	blocks := stat.Tiers[0].Models[0].Blocks
	for _, tier := range stat.Tiers {
		if tier.Tier == "peers" {
			if len(tier.Hosts) != 1 || tier.Hosts[0].ID != "b" {
				t.Errorf("other hosts: %+v", tier)
			}
			continue
		}
		if len(tier.Models) != 1 || tier.Models[0].Model != "gemma" || tier.Models[0].Blocks != blocks || tier.Models[0].Tokens != 64*blocks || tier.Error != "" {
			t.Errorf("%+v, %d blocks in memory", tier, blocks)
		}
	}
	verify := func(bad map[string]int, away string) {
		t.Helper()
		var got verifyOut
		stderr, code := node.kv(&got, "verify")
		if (code != 0) != (len(bad) > 0 || away != "") || len(got.Tiers) != 5 {
			t.Errorf("verify ended with %d: %+v\n%s", code, got, stderr)
		}
		for _, tier := range got.Tiers {
			if tier.Tier == away {
				if tier.Error == "" || !strings.Contains(stderr, "tier "+away) {
					t.Errorf("%+v is away\n%s", tier, stderr)
				}
			} else if tier.Bad != bad[tier.Tier] || tier.Error != "" || tier.Missing != 0 || tier.Verified < blocks-1 {
				t.Errorf("%+v, %d blocks in memory\n%s", tier, blocks, stderr)
			}
		}
	}
	verify(nil, "")
	parts, err := server.Client.Keys(t.Context(), "kvmesh:b:*:0").Result()
	if err != nil || len(parts) != blocks {
		t.Fatalf("%d parts in Redis, %v", len(parts), err)
	}
	if err := server.Client.SetRange(t.Context(), parts[0], 5000, "spoiled").Err(); err != nil {
		t.Fatal(err)
	}
	verify(map[string]int{"redis": 1}, "")
	verify(nil, "")
	bucket.Kill()
	verify(nil, "s3")
}
