package kvcache

// Form is the form of the frames that a store keeps.
type Form uint8

// The forms. A store of one refuses frames of the other, so that nobody who can write to
// it can have a block served whose key nothing proves.
const (
	// Plain frames show their tokens, which prove their keys.
	Plain Form = iota
	// Encrypted frames show what stands for keys and tokens, and are proved by whoever
	// has the key; see package sealed.
	Encrypted
)

// version is that of the frames of a form.
func (form Form) version() uint16 {
	if form == Encrypted {
		return VersionEncrypted
	}
	return Version
}

// Veil says under which names a query's blocks are kept in a store of encrypted frames.
// Keys are those of the store; at and n mean n of the query's tokens from number at on.
type Veil interface {
	// IDs returns what stands for tokens behind a parent. Equal beginnings behind one
	// parent have equal beginnings.
	IDs(parent Key, at, n int) []int32
	// Key returns the key of the block of tokens behind a parent, which is one that Key
	// has returned, or the query's From.
	Key(parent Key, at, n int) Key
}

// Behind returns n of the query's tokens from number at on as the store has them.
func (q *Query) Behind(parent Key, at, n int) []int32 {
	if q.Veil != nil {
		return q.Veil.IDs(parent, at, n)
	}
	return q.IDs[at : at+n]
}

// KeyBehind returns the key of a block of n tokens from number at on as the store has it.
func (q *Query) KeyBehind(parent Key, at, n int) Key {
	if q.Veil != nil {
		return q.Veil.Key(parent, at, n)
	}
	return q.Key(parent, q.IDs[at:at+n])
}
