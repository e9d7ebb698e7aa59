// Package kvcache will hold the KV block store: keys, frames, codecs and tiers.
// It holds nothing yet; workers do not checkpoint and the mesh starts no KV node.
package kvcache
