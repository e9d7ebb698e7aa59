package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// meshWith is a set whose Mesh document has a registry.
func meshWith(registry string) File {
	text := fmt.Sprintf("%s---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec:\n  registry: %s\n", pool, registry)
	return File{Name: "p.yaml", Data: []byte(text)}
}

func TestRegistry(t *testing.T) {
	s, err := Parse(meshWith(`{redis: "rediss://:hunter2@cache:6380/1"}`))
	if err != nil {
		t.Fatal(err)
	}
	if r := s.Mesh.Registry; r.Redis != "rediss://:hunter2@cache:6380/1" || r.AddressTemplate != "worker-{worker_id}:8000" {
		t.Errorf("%+v", r)
	}
	s, err = Parse(meshWith(`{redis: "unix:///run/redis.sock", addressTemplate: "{worker_id}.llm.svc:80"}`))
	if err != nil || s.Mesh.Registry.AddressTemplate != "{worker_id}.llm.svc:80" {
		t.Errorf("%v", err)
	}
	if r := parse(t, pool).Mesh.Registry; r.Redis != "" {
		t.Errorf("without a registry: %+v", r)
	}
}

func TestRegistryMistakes(t *testing.T) {
	for registry, want := range map[string]string{
		`{redis: "http://user:hunter2@h"}`:                                "registry.redis: want",
		`{redis: "redis://:hunter2@"}`:                                    "registry.redis: want",
		`{redis: "redis://:hunter2%zz@h"}`:                                "registry.redis: want",
		`{redis: "unix://h"}`:                                             "registry.redis: want",
		`{addressTemplate: "{worker_id}:80"}`:                             "needs registry.redis",
		`{redis: "redis://h", addressTemplate: "same-for-all:80"}`:        "with {worker_id} in the host",
		`{redis: "redis://h", addressTemplate: "{worker_id}"}`:            "with {worker_id} in the host",
		`{redis: "redis://h", addressTemplate: "{worker_id}:0"}`:          "with {worker_id} in the host",
		`{redis: "redis://h", addressTemplate: "host:{worker_id}"}`:       "with {worker_id} in the host",
		`{rediss: "redis://h"}`:                                           "redis",
		`{redis: "redis://:hunter2@h", addressTemplate: "{worker_id}:x"}`: "with {worker_id} in the host",
	} {
		_, err := Parse(meshWith(registry))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "p.yaml:") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", registry, err)
		}
	}
}

// Streams are shared in a Redis only, and an event waits a little for it unless told
// otherwise.
func TestShareStreams(t *testing.T) {
	mesh := func(spec string) File {
		return File{Name: "p.yaml", Data: []byte(pool + "---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec: " + spec + "\n")}
	}
	if _, err := Parse(mesh("{shareStreams: true}")); err == nil || !strings.Contains(err.Error(), "shareStreams needs registry.redis") {
		t.Errorf("without Redis: %v", err)
	}
	for spec, want := range map[string]time.Duration{
		`{shareStreams: true, registry: {redis: "redis://h"}}`:                 25 * time.Millisecond,
		`{shareStreams: true, shareWait: off, registry: {redis: "redis://h"}}`: 0,
		`{shareStreams: true, shareWait: 1s, registry: {redis: "redis://h"}}`:  time.Second,
	} {
		s, err := Parse(mesh(spec))
		if err != nil || !s.Mesh.ShareStreams || s.Mesh.ShareWait.D() != want {
			t.Errorf("%s: %+v, %v", spec, s, err)
		}
	}
}
