package kvcache

import "encoding/binary"

// domainLMCache begins the salts of tenants that LMCache names.
const domainLMCache = "kvmesh lmcache tenant v1\x00"

// LMCacheSalt returns the salt of a tenant that LMCache names, with the configuration of
// the request, if it has one.
func LMCacheSalt(name string, config []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte(domainLMCache), uint32(len(name)))
	return append(append(b, name...), config...)
}

// TenantRoots returns the roots of a tenant's blocks with a fingerprint: that of its name
// as salt, which requests have as cache_salt, and that of LMCache without a configuration.
func (f Fingerprint) TenantRoots(name string) []Key {
	return []Key{f.Root([]byte(name)), f.Root(LMCacheSalt(name, nil))}
}
