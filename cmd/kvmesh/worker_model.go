package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/worker/modelstore"
)

// modelOptions are the flags that take a worker's model from the model store.
type modelOptions struct{ ref, store string }

// add adds the flags.
func (m *modelOptions) add(f *pflag.FlagSet) {
	f.StringVar(&m.ref, "model-ref", "", "model of the store to run, NAME@VERSION, in place of --weights; see kvmesh models")
	f.StringVar(&m.store, "store", "", "folder of the model store (default KVMESH_STORE, else kvmesh/models in the user's data folder)")
}

// apply sets the flags that neither the command line nor the environment set from
// the model's manifest.
func (m modelOptions) apply(e *env, flags *pflag.FlagSet) error {
	if m.ref == "" {
		if m.store != "" {
			return usagef("--store needs --model-ref")
		}
		return nil
	}
	if flags.Changed("weights") {
		return usagef("--model-ref and --weights exclude each other")
	}
	ref, err := modelstore.ParseRef(m.ref)
	if err != nil {
		return usagef("--model-ref %w", err)
	}
	s, err := e.store(m.store)
	if err != nil {
		return err
	}
	found, err := s.Find(ref)
	if errors.Is(err, modelstore.ErrMissing) {
		return withHint(err, "kvmesh models pull MANIFEST fetches it; kvmesh models ls shows what is there")
	}
	if err != nil {
		return err
	}
	man, number := found.Manifest, func(n int) string { return strconv.Itoa(n) }
	if man.Engine != "" && flags.Changed("engine") && flags.Lookup("engine").Value.String() != man.Engine {
		return usagef("--engine %s: the model %s is for engine %s", flags.Lookup("engine").Value, ref, man.Engine)
	}
	for flag, value := range map[string]string{
		"weights": found.Main(), "model": man.Name, "engine": man.Engine,
		"context-length": number(man.Config.ContextLength), "max-num-seqs": number(man.Config.MaxNumSeqs),
		"kv-tokens": number(man.Config.KVTokens), "threads": number(man.Config.Threads),
	} {
		if value == "" || value == "0" || flags.Changed(flag) {
			continue
		}
		if err := flags.Set(flag, value); err != nil {
			return fmt.Errorf("manifest of %s: --%s %s: %w", ref, flag, value, err)
		}
	}
	return nil
}
