// Package lmcachepb has the messages and services of LMCache's multi-process protocol,
// as far as package lmcache serves them. It is generated.
package lmcachepb
