package codec

import "golang.org/x/sys/cpu"

// hasKernels says whether this processor runs what is in kernels_amd64.s.
func hasKernels() bool { return cpu.X86.HasAVX2 && cpu.X86.HasF16C }

// Each kernel does what its namesake among the methods of plan does, with the same
// result bit for bit, for as many of the first numbers as fill its vectors. It returns
// how many that were; the method does the rest. It believes the length of x, so the
// callers see to it that all else is as long.

// loadHalves stops before the vector that has a number which is not finite.
//
//go:noescape
func loadHalves(x []float32, src []byte) (done int)

//go:noescape
func storeHalves(dst []byte, x []float32) (done int)

//go:noescape
func widen(lo, hi, x []float32) (done int)

// span needs one number at least. Of two zeros it returns either.
//
//go:noescape
func span(x []float32) (lo, hi float32, done int)

//go:noescape
func quantize8(dst []byte, x []float32, k *scales) (done int)

//go:noescape
func quantize4(dst []byte, x []float32, k *scales) (done int)

//go:noescape
func dequantize8(x []float32, src []byte, k *scales) (done int)

//go:noescape
func dequantize4(x []float32, src []byte, k *scales) (done int)

// hadamard does nothing for a width below 8.
//
//go:noescape
func hadamard(x []float32, width int, scale float32) (done int)
