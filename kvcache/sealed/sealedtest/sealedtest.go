// Package sealedtest has the suite of the stores, kvcache/kvtest, run with encryption before
// a store.
package sealedtest

import (
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/sealed"
)

// Env is the variable that tests set where a store is to be encrypted, which the processes
// of the suite see too.
const Env = "KVMESH_TEST_SEALED"

// Text is a file of keys: a default one, an older one, and those of two tenants.
const Text = `{"default": [
	{"id": "new", "key": "lU2XIbLmMXHYnu2GZkmWQBBLvSUSXLQXVz6BJ3JWBqA="},
	{"id": "old", "key": "3ZgD4YB1WrlqHk3DfsILsUOJk2ULcoSdQ1sUNsm9Xvw="}],
"tenants": {
	"t": [{"id": "t1", "key": "UQ4/2XbZfY9cG5N63PSuJ6dO9T6kExY0ZmWkAk1i1yE="}],
	"gone": []}}`

// keys are those of Text.
func keys() (*sealed.Keys, error) { return sealed.ParseKeys([]byte(Text)) }

// Wrap puts encryption with the keys of Text before a store that was opened, or was not.
func Wrap[S kvcache.Store](under S, err error) (kvcache.Store, error) {
	if err != nil {
		return nil, err
	}
	k, err := keys()
	if err != nil {
		return nil, err
	}
	return sealed.New(sealed.Config{Store: under, Keys: k})
}

// Ref is the name under which a store that Wrap made keeps a block.
func Ref(ref kvcache.Ref) kvcache.Ref {
	k, err := keys()
	if err != nil {
		panic(err) // they are this package's own
	}
	name, ok := k.Ref(ref)
	if !ok {
		panic("a tenant without a key")
	}
	return name
}
