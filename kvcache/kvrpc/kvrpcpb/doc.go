// Package kvrpcpb has the messages and the service by which KV nodes of different hosts
// ask each other about blocks and tails; their bytes go another way. It is generated.
package kvrpcpb
