package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// commands holds the state of one script.
type commands struct {
	t      *testing.T
	m      *testmesh.Mesh
	parts  map[string]int
	runDir string
	kvDir  string
}

func (c *commands) setup(e *testscript.Env) error {
	e.Setenv("EXAMPLES", filepath.Join(testmesh.Root(), "examples"))
	e.Setenv("KVMESH", bin) // for what a script runs in the background
	// The fetched Envoy and model are in the user's cache, which a script's
	// empty HOME does not have.
	for _, k := range []string{"HOME", "XDG_CACHE_HOME", "KVMESH_ENVOY", "KVMESH_LLAMA_LIB", "KVMESH_MODEL"} {
		if v := os.Getenv(k); v != "" {
			e.Setenv(k, v)
		}
	}
	return standInForCurl(e)
}

func (c *commands) mesh(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("! mesh: use `! kvmesh up …`")
	}
	c.m = testmesh.Start(c.t, bin, ts.Getenv("WORK"), args...)
	c.parts, c.kvDir = c.m.Parts(), c.m.KVDir()
	ts.Setenv("OPENAI", c.m.OpenAI)
	ts.Setenv("ADMIN", c.m.Admin)
	ts.Setenv("API", c.m.API)
	data, err := os.ReadFile(filepath.Join(c.m.Dir, ".kvmesh", "up.json"))
	ts.Check(err)
	_, rest, _ := strings.Cut(string(data), `"run_dir": "`)
	c.runDir, _, _ = strings.Cut(rest, `"`)
}

func (c *commands) kvmesh(ts *testscript.TestScript, neg bool, args []string) {
	err := ts.Exec(bin, args...)
	if (err != nil) != neg {
		ts.Fatalf("kvmesh %v: err = %v", args, err)
	}
}

// request is a parsed `http` command.
type request struct {
	method, path string
	header       http.Header
	body         io.Reader
}

func parseRequest(ts *testscript.TestScript, args []string) request {
	r := request{header: http.Header{}}
	for len(args) > 1 {
		v := args[1]
		switch args[0] {
		case "-X":
			r.method = v
		case "-H":
			k, val, _ := strings.Cut(v, ":")
			r.header.Add(k, val)
		case "-d":
			r.body = strings.NewReader(v)
		case "-f":
			r.body = strings.NewReader(ts.ReadFile(v))
		case "-zero": // a valid request with a prompt of N bytes
			n, err := strconv.Atoi(v)
			ts.Check(err)
			r.body = strings.NewReader(`{"model":"sim-1","max_tokens":1,"prompt":"` + strings.Repeat("a", n) + `"}`)
		case "-hex": // N bytes 0xff
			n, err := strconv.Atoi(v)
			ts.Check(err)
			r.body = bytes.NewReader(bytes.Repeat([]byte{0xff}, n))
		case "-small": // N short headers
			n, err := strconv.Atoi(v)
			ts.Check(err)
			for i := range n {
				r.header.Set(fmt.Sprintf("x-small-%d", i), "v")
			}
		case "-headers": // N headers of 1 KiB
			n, err := strconv.Atoi(v)
			ts.Check(err)
			for i := range n {
				r.header.Set(fmt.Sprintf("x-flood-%d", i), strings.Repeat("f", 1024))
			}
		default:
			ts.Fatalf("http: unknown flag %s", args[0])
		}
		args = args[2:]
	}
	if len(args) != 1 {
		ts.Fatalf("http: want one path")
	}
	r.path = args[0]
	if r.method == "" {
		r.method = http.MethodGet
		if r.body != nil {
			r.method = http.MethodPost
		}
	}
	return r
}

func (c *commands) http(ts *testscript.TestScript, neg bool, args []string) {
	r := parseRequest(ts, args)
	ctx, cancel := context.WithTimeout(c.t.Context(), 4*time.Minute)
	defer cancel()
	base := strings.TrimSuffix(c.m.OpenAI, "/v1")
	req, err := http.NewRequestWithContext(ctx, r.method, base+r.path, r.body)
	ts.Check(err)
	for k, v := range r.header {
		req.Header[http.CanonicalHeaderKey(k)] = v
	}
	if r.body != nil && req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		body = append(body, "\n[body ended with "+err.Error()+"]"...)
	}
	fmt.Fprintf(ts.Stdout(), "%s\n%s\n%s\n", resp.Status, headerText(resp.Header), body)
	if (resp.StatusCode >= 400) != neg {
		ts.Fatalf("%s %s: %s, neg = %v\n%.1000s", r.method, r.path, resp.Status, neg, body)
	}
}

func headerText(h http.Header) string {
	var lines []string
	for k, v := range h {
		lines = append(lines, strings.ToLower(k)+": "+strings.Join(v, ", "))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func (c *commands) signal(ts *testscript.TestScript, neg bool, args []string) {
	sig, ok := map[string]syscall.Signal{"KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT, "TERM": syscall.SIGTERM}[args[0]]
	if !ok || len(args) < 2 {
		ts.Fatalf("signal: want KILL, STOP, CONT or TERM and parts")
	}
	for _, part := range args[1:] {
		c.m.Signal(c.t, part, sig)
	}
}

// status waits for the control plane's and, through it, Envoy's view.
func (c *commands) status(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("status: want an id and a status")
	}
	testmesh.Eventually(c.t, fmt.Sprintf("%s is %s", args[0], args[1]), 60*time.Second, func() bool {
		list, err := fleet.NewClient(c.m.API).Workers(c.t.Context())
		if err != nil {
			return false
		}
		for _, w := range list {
			if w.ID == args[0] {
				return (w.Status == args[1]) != neg && c.inEnvoy(args[0], args[1]) != neg
			}
		}
		return neg
	})
}

func (c *commands) inEnvoy(id, status string) bool {
	clusters, err := admin.NewClient(c.m.Admin).Clusters(c.t.Context(), "^pool/")
	if err != nil {
		return false
	}
	for _, cl := range clusters {
		for _, h := range cl.Hosts {
			if h.WorkerID == id {
				return h.EDSHealth == admin.Shown(status)
			}
		}
	}
	return false
}

// gone checks that nothing of the mesh is left: processes, run folder, up.json.
func (c *commands) gone(ts *testscript.TestScript, neg bool, _ []string) {
	testmesh.Eventually(c.t, "all parts are gone", 15*time.Second, func() bool {
		for _, pid := range c.parts {
			if testmesh.Alive(pid) {
				return false
			}
		}
		_, run := os.Stat(c.runDir)
		_, kv := os.Stat(c.kvDir)
		return os.IsNotExist(run) && os.IsNotExist(kv)
	})
	if c.kvDir == "" {
		ts.Fatalf("the workers kept no KV before")
	}
	if len(c.parts) < 6 {
		ts.Fatalf("only %v were running before", c.parts)
	}
}
