package sampling

import (
	"encoding/binary"
	"math/rand/v2"
)

// numbers are the random numbers of one step: the output of ChaCha8 keyed by what
// identifies it. There is no state to carry along when a stream moves, and any
// offset can be computed alone. A step needs one, or more under a Constraint.
type numbers struct{ source *rand.ChaCha8 }

func newNumbers(seed uint64, choice int, offset uint64) numbers {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[0:], seed)
	binary.LittleEndian.PutUint64(key[8:], uint64(choice))
	binary.LittleEndian.PutUint64(key[16:], offset)
	copy(key[24:], "sampling") // keeps other uses of the same seed apart
	return numbers{rand.NewChaCha8(key)}
}

// next returns a number in [0,1).
func (n numbers) next() float64 { return float64(n.source.Uint64()>>11) / (1 << 53) }
