package codec

import (
	"syscall"
	"testing"
	"unsafe"

	"github.com/kvmesh/kvmesh/kvcache"
)

// fence is a page between two that nobody may touch: whoever reads or writes a byte
// beside it ends the process.
type fence []byte

func newFence(t *testing.T) fence {
	t.Helper()
	page := syscall.Getpagesize()
	b, err := syscall.Mmap(-1, 0, 3*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(b) })
	for _, side := range [][]byte{b[:page], b[2*page:]} {
		if err := syscall.Mprotect(side, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return fence(b[page : 2*page : 2*page])
}

// bytes returns n bytes at the beginning or the end of the page.
func (f fence) bytes(n int, end bool) []byte {
	if end {
		return f[len(f)-n:]
	}
	return f[:n:n]
}

// floats returns n numbers there.
func (f fence) floats(n int, end bool) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(f.bytes(4*n, end)))), n)
}

// scales returns scales there.
func (f fence) scales(end bool) *scales {
	return (*scales)(unsafe.Pointer(unsafe.SliceData(f.bytes(int(unsafe.Sizeof(scales{})), end))))
}

// TestKernelsStayInside runs every kernel on memory that begins or ends where there is
// no more, for each length up to two groups and more.
func TestKernelsStayInside(t *testing.T) {
	int8s, _ := twins(t, kvcache.CodecInt8, Shape{Elem: F16, Rows: 1, Cols: 1})
	int4s, _ := twins(t, kvcache.CodecInt4, Shape{Elem: F16, Rows: 1, Cols: 1})
	xs, bytes, los, his, ks := newFence(t), newFence(t), newFence(t), newFence(t), newFence(t)
	for _, end := range []bool{false, true} {
		k := ks.scales(end)
		for n := 1; n <= 300; n++ {
			x := xs.floats(n, end)
			if bad := int8s.load(x, bytes.bytes(2*n, end)); bad >= 0 {
				t.Fatalf("number %d is not finite", bad)
			}
			int8s.store(bytes.bytes(2*n, end), x)
			int8s.widen(los.floats(n, end), his.floats(n, end), x)
			int8s.span(x)
			for _, mask := range []int{maskEach, maskOne} {
				k.mask = mask
				for _, p := range []*plan{&int8s, &int4s} {
					clear(x)
					codes := bytes.bytes((n*p.bits+7)/8, end)
					p.quantize(codes, x, k)
					p.dequantize(x, codes, k)
				}
			}
			for width := 1; width <= maxWidth && n%width == 0; width *= 2 {
				p := int4s
				p.width = width
				p.rotate(x)
			}
			clear(bytes)
		}
	}
}
