package policy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

const pool = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: main}
spec:
  engine: sim
  model: sim-1
  local: [{id: w1, zone: a}]
`

func parse(t *testing.T, text string) *Set {
	t.Helper()
	s, err := Parse(File{Name: "p.yaml", Data: []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDefaults(t *testing.T) {
	s := parse(t, pool)
	if s.Mesh.DefaultPool != "main" || s.Mesh.MaxBody != 32<<20 || s.Mesh.Listen.OpenAI != "127.0.0.1:0" {
		t.Errorf("mesh = %+v", s.Mesh)
	}
	p := s.Pool("main")
	if p.Worker.MaxNumSeqs != 64 || p.Connect.D() != time.Second || *p.Health.MinShare != 0.3 || p.Health.Check != "/ready" {
		t.Errorf("pool = %+v", p)
	}
	r := s.Route("sim-1")
	if r == nil || r.Tiers[0].Pool != "main" || r.Tiers[0].Model != "sim-1" || !*r.Relay || *r.Retries != 2 {
		t.Fatalf("route = %+v", r)
	}
	if r.Timeouts.FirstByte.D() != 600*time.Second || r.Timeouts.Request != Off {
		t.Errorf("timeouts = %+v", r.Timeouts)
	}
	if s.Route("other") != nil {
		t.Error("an unknown model has a route")
	}
}

func TestRoutesAndAliases(t *testing.T) {
	s := parse(t, pool+`---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: big}
spec: {engine: openai, static: [{url: "http://127.0.0.1:8000"}]}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: r}
spec:
  models: [sim-1, gpt-4o-mini]
  tiers: [{pool: main}, {pool: big, model: llama}]
  timeouts: {firstByte: 5s, streamIdle: off}
  retries: 0
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: rest}
spec: {models: ["*"], tiers: [{pool: big}]}
`)
	if got := s.Route("gpt-4o-mini").Name; got != "r" {
		t.Errorf("route = %s", got)
	}
	if got := s.Route("anything").Name; got != "rest" {
		t.Errorf("catch-all route = %s", got)
	}
	if got := strings.Join(s.Aliases("main"), ","); got != "gpt-4o-mini" {
		t.Errorf("aliases of main = %s", got)
	}
	if got := strings.Join(s.Aliases("big"), ","); got != "sim-1,gpt-4o-mini,llama" {
		t.Errorf("aliases of big = %s", got)
	}
	r := s.Route("sim-1")
	if r.Timeouts.StreamIdle != Off || r.Timeouts.FirstByte.D() != 5*time.Second || *r.Retries != 0 {
		t.Errorf("route = %+v", r)
	}
	if id := s.Pool("big").Static[0].ID; id != "127.0.0.1:8000" {
		t.Errorf("static id = %q", id)
	}
}

// Every mistake names the file and the line it is in, and the nearest right name.
func TestMistakes(t *testing.T) {
	doc := func(kind, spec string) string {
		return "apiVersion: kvmesh.io/v1alpha1\nkind: " + kind + "\nmetadata: {name: x}\nspec:\n" + spec
	}
	for _, c := range []struct{ name, text, want string }{
		{"typo in spec", strings.Replace(pool, "engine:", "engin:", 1), `p.yaml:5: unknown field "engin" (did you mean "engine"?)`},
		{"typo in a list", strings.Replace(pool, "zone: a", "zon: a", 1), `p.yaml:7: unknown field "local[0].zon" (did you mean "zone"?)`},
		{"typo at the top", strings.Replace(pool, "metadata:", "metdata:", 1), `p.yaml:3: unknown field "metdata" (did you mean "metadata"?)`},
		{"kind", strings.Replace(pool, "WorkerPool", "WorkrPool", 1), `unknown kind "WorkrPool" (did you mean "WorkerPool"?)`},
		{"later kind", doc("CachePolicy", "  {}"), "CachePolicy is not supported by this version"},
		{"version", strings.Replace(pool, "v1alpha1", "v2", 1), `p.yaml:1: apiVersion "kvmesh.io/v2": want kvmesh.io/v1alpha1`},
		{"engine", strings.Replace(pool, "engine: sim", "engine: sims", 1), `engine "sims" (did you mean "sim"?)`},
		{"duration", pool + "  connect: soon\n", `p.yaml:8: "soon" is no duration`},
		{"type", pool + "  worker: {maxNumSeqs: many}\n", `p.yaml:8: "many" stands where a whole number belongs`},
		{"plain text", "foo", `p.yaml:1: "foo" stands where a mapping (name: value) belongs`},
		{"a list for a mapping", pool + "  worker: [1]\n", "p.yaml:8: a list stands where a mapping (name: value) belongs"},
		{"a mapping for a list", strings.Replace(pool, "[{id: w1, zone: a}]", "{id: w1}", 1), "a mapping stands where a list belongs"},
		{"text for yes or no", doc("ModelRoute", "  {models: [a], tiers: [{pool: x}], retries: no}"), "stands where a whole number belongs"},
		{"syntax", pool + "  worker: {", "p.yaml:"},
		{"no name", strings.Replace(pool, "{name: main}", "{}", 1), "metadata.name: missing"},
		{"no spec", "apiVersion: kvmesh.io/v1alpha1\nkind: WorkerPool\nmetadata: {name: x}\n", "p.yaml:1: spec: missing"},
		{"no spec, later", pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: WorkerPool\nmetadata: {name: x}\n", "p.yaml:9: spec: missing"},
		{"twice", pool + "---\n" + pool, "WorkerPool/main is already defined at p.yaml:1"},
		{"tab", "\tkind: x", "p.yaml:1"},
		{"unknown anchor", "a: *b", "p.yaml:1"},
		{"value of two lines", pool + "  worker: {maxNumSeqs: \"a\\nb\"}\n", `p.yaml:8: "a\nb" stands where a whole number belongs`},
		{"no pool", doc("ModelRoute", "  {models: [a], tiers: [{pool: x}]}"), "no WorkerPool"},
		{"route to nowhere", pool + "---\n" + doc("ModelRoute", "  {models: [a], tiers: [{pool: mian}]}"), `tiers[0].pool "mian": no such WorkerPool (did you mean "main"?)`},
		{"model twice", pool + "---\n" + doc("ModelRoute", "  {models: [a, a], tiers: [{pool: main}]}"), `model "a" is already routed by x`},
		{"worker id twice", strings.Replace(pool, "[{id: w1, zone: a}]", "[{id: w1}, {id: w1}]", 1), `worker id "w1" is already used`},
		{"backend url", doc("WorkerPool", "  {engine: openai, static: [{url: 'localhost:1'}]}"), "want http://HOST:PORT"},
		{"share", pool + "  health: {minShare: 3}\n", "health.minShare 3: want 0 to 1"},
		{"listen", pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {listen: {openai: 'myhost:80'}}\n", `p.yaml:11: listen.openai "myhost:80": "myhost" is no IP address`},
		{"listen, named mesh", pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nmetadata: {name: m}\nspec: {listen: {api: '127.0.0.1'}}\n", `p.yaml:12: listen.api "127.0.0.1": want ip:port`},
		{"default pool, named mesh", "apiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nmetadata: {name: m}\nspec: {defaultPool: x}\n---\n" + pool, `p.yaml:4: defaultPool "x": no such WorkerPool`},
		{"two meshes", pool + strings.Repeat("---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nmetadata: {name: m}\nspec: {}\n", 1) + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {}\n", `p.yaml:14: a second Mesh: one is at p.yaml:9 already`},
		{"size", pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {maxBody: 3Tb}\n", `"3Tb" is no size`},
		{"default pool", pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {defaultPool: man}\n", `defaultPool "man": no such WorkerPool (did you mean "main"?)`},
		{"empty", "", "no WorkerPool"},
		{"not an object", "- 1\n- 2\n", "p.yaml:1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse(File{Name: "p.yaml", Data: []byte(c.text)})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error = %v\nwant one with %q", err, c.want)
			}
		})
	}
}

// A mistake that only shows when all files are read is told with the file it is in.
func TestMistakesNameTheirFile(t *testing.T) {
	route := "apiVersion: kvmesh.io/v1alpha1\nkind: ModelRoute\nmetadata: {name: x}\nspec: {models: [a], tiers: [{pool: none}]}\n"
	_, err := Parse(File{Name: "a.yaml", Data: []byte(route)}, File{Name: "b.yaml", Data: []byte(pool)})
	if err == nil || !strings.HasPrefix(err.Error(), `a.yaml:4: ModelRoute x: tiers[0].pool "none"`) {
		t.Errorf("error = %v", err)
	}
}

func TestListenAddress(t *testing.T) {
	s := parse(t, pool+"---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nmetadata: {name: m}\nspec: {listen: {openai: 'localhost:80', api: '[::1]:0'}}\n")
	if s.Mesh.Listen.OpenAI != "127.0.0.1:80" || s.Mesh.Listen.API != "[::1]:0" {
		t.Errorf("listen = %+v", s.Mesh.Listen)
	}
	for _, addr := range []string{"", ":80", "80", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", "example.org:80"} {
		if got, err := ListenAddress(addr); err == nil {
			t.Errorf("%q was taken as %s", addr, got)
		}
	}
}

// All mistakes are told at once, not one per run.
func TestAllMistakesAtOnce(t *testing.T) {
	text := strings.Replace(strings.Replace(pool, "engine:", "engin:", 1), "model:", "modle:", 1)
	_, err := Parse(File{Name: "p.yaml", Data: []byte(text)})
	if err == nil || strings.Count(err.Error(), "unknown field") != 2 {
		t.Errorf("error = %v, want both typos", err)
	}
}

func TestExamplesParse(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("examples: %v %v", files, err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(File{Name: f, Data: data}); err != nil {
			t.Errorf("%v", err)
		}
	}
}

func TestBytes(t *testing.T) {
	s := parse(t, pool+"---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {maxBody: 64Ki, heldBodies: 1Gi}\n")
	if s.Mesh.MaxBody != 64<<10 || s.Mesh.HeldBodies != 1<<30 {
		t.Errorf("mesh = %+v", s.Mesh)
	}
}

func TestRetain(t *testing.T) {
	route := "---\napiVersion: kvmesh.io/v1alpha1\nkind: ModelRoute\nmetadata: {name: r}\nspec:\n  models: [m]\n  tiers: [{pool: main}]\n"
	s := parse(t, pool+route)
	if r := s.Routes[0].Stream; r.Retain.D() != time.Minute || r.RetainSize != 4<<20 || s.Mesh.HeldStreams != 256<<20 {
		t.Errorf("defaults: %+v, %d", r, s.Mesh.HeldStreams)
	}
	s = parse(t, pool+route+"  stream: {retain: off, retainSize: 64Ki}\n---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {heldStreams: 1Mi}\n")
	if r := s.Routes[0].Stream; r.Retain.D() != 0 || r.RetainSize != 64<<10 || s.Mesh.HeldStreams != 1<<20 {
		t.Errorf("as given: %+v, %d", r, s.Mesh.HeldStreams)
	}
	_, err := Parse(File{Name: "f.yaml", Data: []byte(pool + route + "  stream:\n    retian: 5s\n")})
	if err == nil || !strings.Contains(err.Error(), "f.yaml:") || !strings.Contains(err.Error(), "retain") {
		t.Errorf("a typo: %v", err)
	}
}

// FuzzParse: whatever the file, the answer is a usable set or an error, and every
// error line names the file.
func FuzzParse(f *testing.F) {
	f.Add(pool)
	f.Add("a: &a [*a]")
	f.Add("apiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: {listen: 3}\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(File{Name: "f", Data: []byte(text)})
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				if !regexp.MustCompile(`^f:[1-9]`).MatchString(line) {
					t.Errorf("error without place: %q", line)
				}
			}
			return
		}
		if s.Pool(s.Mesh.DefaultPool) == nil || len(s.Routes) == 0 {
			t.Errorf("set accepted without default pool or routes: %+v", s)
		}
	})
}
