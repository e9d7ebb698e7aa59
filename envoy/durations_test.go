package envoy_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// durationPaths lists every duration of a kind's spec, however deep.
func durationPaths(t reflect.Type, path string) []string {
	if t == reflect.TypeFor[policy.Duration]() {
		return []string{path}
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var out []string
	for f := range t.Fields() {
		if name := f.Tag.Get("yaml"); name != "" && name != "-" {
			out = append(out, durationPaths(f.Type, strings.TrimPrefix(path+"."+name, "."))...)
		}
	}
	return out
}

// durationDocument is a policy in which each of some durations, by kind, is value.
func durationDocument(value string, paths map[string][]string) string {
	var b strings.Builder
	for _, kind := range []string{policy.KindMesh, policy.KindWorkerPool, policy.KindModelRoute} {
		var spec strings.Builder
		spec.WriteString(map[string]string{
			policy.KindMesh:       "{zone: a",
			policy.KindWorkerPool: "{engine: sim, model: m, local: [{id: w1}]",
			policy.KindModelRoute: "{models: [m], tiers: [{pool: x}]",
		}[kind])
		inner := map[string][]string{}
		for _, path := range paths[kind] {
			if outer, name, deep := strings.Cut(path, "."); deep {
				inner[outer] = append(inner[outer], name+": "+value)
			} else {
				spec.WriteString(", " + path + ": " + value)
			}
		}
		for outer, list := range inner {
			spec.WriteString(", " + outer + ": {" + strings.Join(list, ", ") + "}")
		}
		fmt.Fprintf(&b, "---\napiVersion: %s\nkind: %s\nmetadata: {name: x}\nspec: %s}\n", policy.APIVersion, kind, spec.String())
	}
	return b.String()
}

// TestEveryDurationIsTakenOrRefused: what the policy's check lets through, for whichever
// duration, Envoy takes, and it refuses the rest with the line.
func TestEveryDurationIsTakenOrRefused(t *testing.T) {
	envoytest.Binary(t)
	all := map[string][]string{
		policy.KindMesh:       durationPaths(reflect.TypeFor[policy.Mesh](), ""),
		policy.KindWorkerPool: durationPaths(reflect.TypeFor[policy.WorkerPool](), ""),
		policy.KindModelRoute: durationPaths(reflect.TypeFor[policy.ModelRoute](), ""),
	}
	for _, value := range []string{"off", "1ns", "100us", "1ms", "59m59s", "1h1ms", "1000h", "8760h", "1000000h"} {
		t.Run(value, func(t *testing.T) {
			t.Parallel()
			taken, n := map[string][]string{}, 0
			for kind, paths := range all {
				for _, path := range paths {
					one := map[string][]string{kind: {path}}
					if path == "stream.stallMin" { // at most the other, whose default is 30s
						one[kind] = append(one[kind], "stream.stallMax")
					}
					_, err := policy.Parse(policy.File{Name: "p.yaml", Data: []byte(durationDocument(value, one))})
					switch line := map[string]int{policy.KindMesh: 5, policy.KindWorkerPool: 10, policy.KindModelRoute: 15}[kind]; {
					case err == nil:
						taken[kind] = append(taken[kind], path)
						n++
					case !strings.HasPrefix(err.Error(), fmt.Sprintf("p.yaml:%d: ", line)) || !strings.Contains(err.Error(), path):
						t.Errorf("%s %s: %v, want line %d", kind, path, err, line)
					}
				}
			}
			t.Logf("%d taken: %v", n, taken)
			c := goldenConfig(t)
			c.Policy, c.AccessLog = parse(t, durationDocument(value, taken)), ""
			r, err := envoy.Build(c)
			if err != nil {
				t.Fatal(err)
			}
			envoytest.Validate(t, envoytest.Static(t, r))
		})
	}
}
