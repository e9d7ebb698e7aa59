package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Key names a block, or the root of a space. Keys are comparable.
type Key [32]byte

// Fingerprint is the hash of everything that must be equal for one engine to
// use the state of another.
type Fingerprint [32]byte

// The domains keep a hash of one kind from being taken for another's.
const (
	domainFingerprint = "kvmesh kv fingerprint v1\x00"
	domainRoot        = "kvmesh kv root v1\x00"
	domainBlock       = "kvmesh kv block v1\x00"
)

// Space is a family of blocks that may follow each other: those of one
// fingerprint and one tenant. Spaces are comparable.
type Space struct {
	Fingerprint Fingerprint
	// Root is the parent of the first blocks. It covers the fingerprint.
	Root Key
}

// NewSpace returns the space of an engine's fingerprint text and a tenant's
// salt, which may be empty.
func NewSpace(fingerprint string, salt []byte) Space {
	f := FingerprintOf(fingerprint)
	return Space{f, f.Root(salt)}
}

// Root returns the parent of the first blocks of a space.
func Root(fingerprint string, salt []byte) Key { return FingerprintOf(fingerprint).Root(salt) }

// FingerprintOf hashes the text that describes weights, engine build, layout,
// types, context parameters and adapter.
func FingerprintOf(text string) Fingerprint {
	return sha256.Sum256(append([]byte(domainFingerprint), text...))
}

// Root returns the parent of a tenant's first blocks.
func (f Fingerprint) Root(salt []byte) Key {
	b := append([]byte(domainRoot), f[:]...)
	return sha256.Sum256(append(b, salt...))
}

// Key returns the key of the block that holds ids after parent.
func (s Space) Key(parent Key, ids []int32) Key {
	// One block of tokens fits on the stack.
	var room [512]byte
	b := append(room[:0], domainBlock...)
	b = append(b, s.Fingerprint[:]...)
	b = append(b, s.Root[:]...)
	b = append(b, parent[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ids)))
	return sha256.Sum256(appendIDs(b, ids))
}

// appendIDs writes token ids as frames and hashes have them.
func appendIDs(b []byte, ids []int32) []byte {
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b
}

// String writes a key as 64 hexadecimal digits.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// String writes a fingerprint as 64 hexadecimal digits.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// ParseKey reads what Key.String wrote.
func ParseKey(s string) (k Key, err error) {
	if len(s) != 2*len(k) {
		return k, fmt.Errorf("key %q: want %d hexadecimal digits", s, 2*len(k))
	}
	if _, err := hex.Decode(k[:], []byte(s)); err != nil {
		return Key{}, fmt.Errorf("key %q: %w", s, err)
	}
	return k, nil
}

// Ref names one block with everything that a reader checks.
type Ref struct {
	Space
	Parent Key
	Key    Key
}

// Child returns the name of the block that holds ids after parent.
func (s Space) Child(parent Key, ids []int32) Ref {
	return Ref{s, parent, s.Key(parent, ids)}
}
