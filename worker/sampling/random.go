package sampling

import (
	"encoding/binary"
	"math/rand/v2"
)

// uniform returns a number in [0,1) that depends on its arguments only: the first
// output of ChaCha8 keyed by them. There is no state to carry along when a stream
// moves, and any offset can be computed alone.
func uniform(seed uint64, choice int, offset uint64) float64 {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[0:], seed)
	binary.LittleEndian.PutUint64(key[8:], uint64(choice))
	binary.LittleEndian.PutUint64(key[16:], offset)
	copy(key[24:], "sampling") // keeps other uses of the same seed apart
	return float64(rand.NewChaCha8(key).Uint64()>>11) / (1 << 53)
}
