//go:build !amd64

package codec

// hasKernels is false: pure Go does all that is done here.
func hasKernels() bool { return false }

// The kernels are described in kernels_amd64.go. These do none of the numbers.

func loadHalves([]float32, []byte) (done int)           { return 0 }
func storeHalves([]byte, []float32) (done int)          { return 0 }
func widen(_, _, _ []float32) (done int)                { return 0 }
func span(x []float32) (lo, hi float32, done int)       { return x[0], x[0], 0 }
func quantize8([]byte, []float32, *scales) (done int)   { return 0 }
func quantize4([]byte, []float32, *scales) (done int)   { return 0 }
func dequantize8([]float32, []byte, *scales) (done int) { return 0 }
func dequantize4([]float32, []byte, *scales) (done int) { return 0 }
func hadamard([]float32, int, float32) (done int)       { return 0 }
