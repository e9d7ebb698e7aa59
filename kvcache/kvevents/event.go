package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Hash is how an engine names a block: 1 to 32 bytes, or a number. It says nothing of how it was
// computed, which differs between engines and their settings. Hashes are comparable; the
// zero Hash is none.
type Hash struct {
	bytes [mostHash]byte
	n     uint8 // of bytes; 0 = none
	num   bool  // the 8 bytes are a number, big-endian
}

// mostHash is the bytes of the longest hash: engines use SHA-256, or less.
const mostHash = 32

// HashOf is the hash of some bytes; false = there are none, or more than 32.
func HashOf(b []byte) (h Hash, ok bool) {
	if len(b) < 1 || len(b) > mostHash {
		return Hash{}, false
	}
	h.n = uint8(copy(h.bytes[:], b))
	return h, true
}

// HashNumber is the hash that is a number.
func HashNumber(n uint64) Hash {
	h := Hash{n: 8, num: true}
	binary.BigEndian.PutUint64(h.bytes[:], n)
	return h
}

// IsZero says whether it is no hash.
func (h Hash) IsZero() bool { return h.n == 0 }

// Bytes are those of the hash, nil where it is a number or none.
func (h Hash) Bytes() []byte {
	if h.num || h.n == 0 {
		return nil
	}
	return h.bytes[:h.n]
}

// Number is the hash as vLLM makes a number of it: its last 8 bytes, big-endian.
func (h Hash) Number() uint64 {
	var b [8]byte
	n := min(8, int(h.n))
	copy(b[8-n:], h.bytes[int(h.n)-n:h.n])
	return binary.BigEndian.Uint64(b[:])
}

// String writes a hash in hexadecimal digits, and a number as one.
func (h Hash) String() string {
	if h.num {
		return fmt.Sprint(h.Number())
	}
	return hex.EncodeToString(h.bytes[:h.n])
}

// Kind is what an event tells.
type Kind uint8

// The kinds, by the names that they have on the wire.
const (
	// BlockStored tells of blocks that follow each other and are there from now on.
	BlockStored Kind = iota + 1
	// BlockRemoved tells of blocks that are not there any more.
	BlockRemoved
	// AllBlocksCleared tells that no block is there any more, in any medium.
	AllBlocksCleared
)

// String is the kind's name on the wire.
func (k Kind) String() string {
	switch k {
	case BlockStored:
		return "BlockStored"
	case BlockRemoved:
		return "BlockRemoved"
	case AllBlocksCleared:
		return "AllBlocksCleared"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// The media that vLLM names. "" is that of the engine's own computation.
const (
	MediumGPU     = "GPU"
	MediumCPU     = "CPU"
	MediumStorage = "STORAGE"
)

// Event is one event. Fields that its kind does not have are zero.
type Event struct {
	Kind Kind
	// Hashes are the blocks', in the order of their tokens. Of BlockStored and BlockRemoved.
	Hashes []Hash
	// Medium is where the blocks are. Of BlockStored and BlockRemoved.
	Medium string
	// Group is the number of the group of layers that the blocks are of; 0 where none is said.
	Group int

	// What follows is of BlockStored only.

	// Parent is the block that the first one follows; none where that is a sequence's first.
	Parent Hash
	// IDs are the tokens of all blocks, each BlockSize long. They are a prompt's, so a publisher
	// may leave them out.
	IDs       []int32
	BlockSize int
	// LoRA is the adapter's name.
	LoRA string
	// Extra is what else the hash of each block covers: a MessagePack array, nil for a block of
	// which there is nothing else. It is as long as Hashes, or nil.
	Extra [][]byte
}

// Batch is what one message has.
type Batch struct {
	// Time is in seconds since 1970.
	Time   float64
	Events []Event
	// Rank is the engine's among those of its data-parallel group.
	Rank int
	// Unknown is how many events were left out when it was read: those of kinds that are not
	// known here.
	Unknown int
}
