// Package sealed is a kvcache.Store that encrypts what it puts into another one: the far
// tiers of a KV node, where others than the node may read the disk or the server. Each
// tenant has keys of its own, see Keys. What it is put on must keep frames of the form
// kvcache.Encrypted and look them up by kvcache/remote.
//
// # What a store shows
//
// In names and headers: the model's fingerprint, how many tokens a block has and where they
// begin in their sequence, when it was written, and about how long it is. Everything else
// of a prompt is a keyed hash, by which equal prefixes of one tenant can be told to be equal,
// and nothing more:
//
//	secret   a tenant's, 32 bytes
//	names    HKDF-SHA256(secret, info "kvmesh sealed names v1")
//	token1,2 HKDF-SHA256(secret, info "kvmesh sealed tokens 1 v1", "… 2 v1")
//	root, parent, key: HMAC-SHA256(names, that of the plain frame)
//	token i  the first 4 bytes of AES-256(token2, state i), where state i is
//	         AES-256(token1, state i-1 XOR id i), id in its first 4 bytes, little-endian,
//	         and the state before the first is that of the plain parent's key, hashed
//	         in two steps of 16 bytes by the same rule from a state of zeros
//
// # Frame
//
// An encrypted frame is one of version 2 of package kvcache with those names. Its first part,
// of plane PlaneMeta, has 80 bytes, little-endian; the others, of plane PlaneAll, are the
// plain frame, cut into pieces:
//
//	offset size
//	     0   16  the key's id, then zeros
//	    16   32  salt, random
//	    48    8  length of the plain frame
//	    56    8  length of each piece but the last, which may be shorter
//	    64   16  0
//
//	piece i  AES-256-GCM(HKDF-SHA256(secret, salt, info "kvmesh sealed frame v1" key), nonce, AAD)
//	nonce    i:u64, then 3 bytes of 0, then 1 for the last piece and else 0
//	AAD      SHA-256 of "kvmesh sealed header v1", fingerprint, root, parent, key, first:u64,
//	         n:u32, the n token ids as the frame shows them, and the first part
//
// A piece is 1 MiB, or as many more as leave at most 4,095 of them. Each can be verified and
// opened alone; the salt keeps two writers of one block from using one key and nonce for
// different bytes. Whatever is changed, cut, moved, or of another key is refused with
// kvcache.ReasonChecksum, counted by the store below and removed; what is in the plain
// frame is checked again as any frame.
//
// Version rule: that of package kvcache; the texts above have the version in them.
package sealed
