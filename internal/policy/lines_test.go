package policy

import (
	"fmt"
	"strings"
	"testing"
)

// head begins a document.
const head = "apiVersion: kvmesh.io/v1alpha1\nkind: "

// A value that is wrong is told at its own line, however deep it is; one that is
// missing, where it should be.
func TestMistakesNameTheirLine(t *testing.T) {
	mesh := func(lines string) string {
		return pool + "---\n" + head + "Mesh\nspec:\n" + lines // the first of lines is 12
	}
	sim := func(lines string) string { return pool + lines } // the first of lines is 8
	static := func(lines string) string {
		return head + "WorkerPool\nmetadata: {name: x}\nspec:\n  engine: openai\n  static:\n" + lines // 7
	}
	route := func(lines string) string {
		return pool + "---\n" + head + "ModelRoute\nmetadata: {name: x}\nspec:\n" + lines // 13
	}
	for _, c := range []struct{ name, text, want string }{
		{"engine", strings.Replace(pool, "engine: sim", "engine: simm", 1), `5: WorkerPool main: engine "simm" (did you mean "sim"?)`},
		{"no model", strings.Replace(pool, "  model: sim-1\n", "", 1), `1: WorkerPool main: model: missing`},
		{"kind", strings.Replace(pool, "WorkerPool", "WorkerPol", 1), `2: unknown kind "WorkerPol"`},
		{"name", strings.Replace(pool, "name: main", "name: Main", 1), `3: metadata.name "Main"`},
		{"name twice", pool + "---\n" + pool, `11: WorkerPool/main is already defined at p.yaml:1`},
		{"worker id", strings.Replace(pool, "[{id: w1, zone: a}]", "\n  - id: w1\n  - zone: b\n    id: W2\n", 1), `10: WorkerPool main: local[1].id "W2"`},
		{"worker id twice", strings.Replace(pool, "[{id: w1, zone: a}]", "\n  - id: w1\n  - zone: b\n    id: w1\n", 1), `10: WorkerPool main: worker id "w1" is already used in main`},
		{"worker port", strings.Replace(pool, "[{id: w1, zone: a}]", "\n  - id: w1\n    port: 99999", 1), `9: WorkerPool main: local[0].port 99999`},
		{"worker port twice", strings.Replace(pool, "[{id: w1, zone: a}]", "\n  - {id: w1, port: 9001}\n  - {id: w2, port: 9001}", 1), `9: worker w2: port 9001 is worker w1's already`},
		{"share", sim("  health:\n    minShare: 3\n"), `9: WorkerPool main: health.minShare 3`},
		{"check", sim("  health:\n    check: ready\n"), `9: WorkerPool main: health.check "ready": want a path`},
		{"no seqs", sim("  worker:\n    maxNumSeqs: 0\n"), `9: WorkerPool main: worker.maxNumSeqs 0: want a positive number`},
		{"anchor", sim("  worker: &w\n    threads: -1\n"), `9: WorkerPool main: worker.threads -1`},
		{"server port", static("  - url: http://a:1\n  - zone: z\n    url: http://b:99999\n"), `9: WorkerPool x: static[1].url "http://b:99999": port "99999": want 1 to 65535`},
		{"server without url", static("  - url: http://a:1\n  - zone: z\n"), `8: WorkerPool x: static[1].url "": want http://HOST:PORT`},
		{"server id", static("  - url: http://a:1\n    id: a b\n"), `8: WorkerPool x: static[0].id "a b"`},
		{"server twice", static("  - url: http://a:1\n  - url: http://a:1/v1\n"), `8: WorkerPool x: worker id "a:1" is already used in x`},
		{"pool of a tier", route("  models: [a]\n  tiers:\n  - pool: mian\n"), `15: ModelRoute x: tiers[0].pool "mian": no such WorkerPool (did you mean "main"?)`},
		{"no tokens", route("  models: [a]\n  tiers:\n  - pool: main\n    maxTokens: 0\n"), `16: ModelRoute x: tiers[0].maxTokens 0: want a positive number; leave it out for no limit`},
		{"no tiers", route("  models: [a]\n  tiers: []\n"), `14: ModelRoute x: needs models and tiers`},
		{"model twice", route("  models:\n  - a\n  - a\n  tiers: [{pool: main}]\n"), `15: ModelRoute x: model "a" is already routed by x`},
		{"retries", route("  models: [a]\n  tiers: [{pool: main}]\n  retries: 11\n"), `15: ModelRoute x: retries 11`},
		{"moves", route("  models: [a]\n  tiers: [{pool: main}]\n  stream:\n    moves: -1\n"), `16: ModelRoute x: stream.moves -1`},
		{"stall", route("  models: [a]\n  tiers: [{pool: main}]\n  stream:\n    stallMax: 1s\n    stallMin: 2s\n"), `17: ModelRoute x: stream.stallMin 2s`},
		{"body", mesh("  maxBody: 900Gi\n"), `12: maxBody 900Gi: want at most 512Mi`},
		{"body beyond numbers", mesh("  maxBody: 9000000000000Gi\n"), `12: "9000000000000Gi" is too large a size`},
		{"held", mesh("  maxBody: 2Mi\n  heldBodies: 1Mi\n"), `13: heldBodies 1Mi: want at least maxBody, which is 2Mi`},
		{"sockets", mesh("  listen:\n    admin: 127.0.0.1:0\n    sockets: run/x\n"), `14: listen.sockets "run/x": want the absolute path of a folder, at most 85 bytes`},
		{"sockets, long", mesh("  listen: {sockets: /" + strings.Repeat("x", 85) + "}\n"), `12: listen.sockets "/xxx`},
		{"sockets, odd", mesh("  listen: {sockets: /run/../x/}\n"), `12: listen.sockets "/run/../x/": want`},
		{"threads", mesh("  envoy:\n    concurrency: 0\n"), `13: envoy.concurrency 0: want 1 to 1024`},
		{"level", mesh("  envoy:\n    logLevel: warnin\n"), `13: envoy.logLevel "warnin" (did you mean "warning"?)`},
		{"default pool", mesh("  zone: a\n  defaultPool: man\n"), `13: defaultPool "man": no such WorkerPool`},
		{"redis", mesh("  registry:\n    redis: http://x\n"), `13: registry.redis: want redis://`},
		{"port twice", mesh("  listen:\n    openai: 127.0.0.1:9000\n    metrics: localhost:9000\n"), `14: listen.metrics: port 9000 is listen.openai's already`},
		{"port of all addresses twice", mesh("  listen:\n    admin: 127.0.0.1:9000\n    openai: 0.0.0.0:9000\n"), `13: listen.admin: port 9000 is listen.openai's already`},
		{"port of a worker", strings.Replace(pool, "zone: a", "port: 9000", 1) + "---\n" + head + "Mesh\nspec: {listen: {api: '127.0.0.1:9000'}}\n", `7: worker w1: port 9000 is listen.api's already`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse(File{Name: "p.yaml", Data: []byte(c.text)})
			if err == nil || !strings.HasPrefix(err.Error(), "p.yaml:"+c.want) {
				t.Errorf("error = %v\nwant      p.yaml:%s", err, c.want)
			}
		})
	}
}

// Ports of different addresses are different ports.
func TestPortsApart(t *testing.T) {
	s := parse(t, pool+"---\n"+head+"Mesh\nspec: {listen: {openai: '127.0.0.2:9000', api: '127.0.0.1:9000', admin: '127.0.0.1:0', metrics: '127.0.0.1:0'}}\n")
	if a, b, twice := s.PortTwice(); twice {
		t.Errorf("%s and %s", a, b)
	}
	s.Mesh.Listen.Metrics = "127.0.0.2:9000"
	if a, b, twice := s.PortTwice(); !twice || a != "listen.openai" || b != "listen.metrics" {
		t.Errorf("%q and %q, %v", a, b, twice)
	}
}

func TestServerURL(t *testing.T) {
	for _, ok := range []string{"http://a", "https://a:443", "http://127.0.0.1:65535/", "http://[::1]:1/v1", "https://a.example/v1/"} {
		if _, err := ServerURL(ok); err != nil {
			t.Errorf("%s: %v", ok, err)
		}
	}
	for text, want := range map[string]string{
		"http://x:99999":            `port "99999": want 1 to 65535`,
		"http://x:0":                `port "0"`,
		"http://x:":                 `port ""`,
		"http://x:-1":               "a port of 1 to 65535",
		"http://x:http":             "a port of 1 to 65535",
		"http://:80":                "want http://HOST:PORT",
		"http://":                   "want http://HOST:PORT",
		"ftp://x":                   "want http://HOST:PORT",
		"x:80":                      "want http://HOST:PORT",
		"":                          "want http://HOST:PORT",
		"http://x:1?a=b":            "query or fragment",
		"http://x:1?":               "query or fragment",
		"http://x:1#f":              "query or fragment",
		"http://x:1/v1/models":      "a path is not supported",
		"http://x:1//v1":            "a path is not supported",
		"http://0.0.0.0:1":          "is no host's",
		"http://[::]:1":             "is no host's",
		"http://224.0.0.1:1":        "is no host's",
		"http://255.255.255.255:1":  "is no host's",
		"http://[fe80::1%25eth0]:1": "has an interface",
		"http://me:secret@x:1":      "user and password are not supported",
		"http://me:secret@x:99999":  `port "99999"`,
		"http://me:secret@x:y":      "a port of 1 to 65535",
	} {
		_, err := ServerURL(text)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestBytesString(t *testing.T) {
	for n, want := range map[Bytes]string{0: "0", 1: "1", 1023: "1023", 1 << 10: "1Ki", 3 << 19: "1536Ki", 512 << 20: "512Mi", 1 << 40: "1024Gi"} {
		if got := fmt.Sprint(n); got != want {
			t.Errorf("%d: %s, want %s", int64(n), got, want)
		}
	}
}
