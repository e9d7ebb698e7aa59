// Kernels for AVX2 and F16C. kernels_amd64.go says what they promise, and the methods
// of plan in rows.go are their twins in Go: the same operations on the same numbers in
// an order that gives the same bits. So nothing is fused to one rounding here.
//
// In all of them AX counts the numbers that are done, and CX is where it ends. Nothing
// is aligned. Go's assembler has the operands of a vector instruction in the reverse
// order of the manuals: VSUBPS b, a, d is d = a - b, and VMINPS b, a, d is
// d = a < b ? a : b.

#include "go_asm.h"
#include "textflag.h"

// The order in which 32 bytes, packed from four vectors, lie in fours.
DATA order<>+0(SB)/4, $0
DATA order<>+4(SB)/4, $4
DATA order<>+8(SB)/4, $1
DATA order<>+12(SB)/4, $5
DATA order<>+16(SB)/4, $2
DATA order<>+20(SB)/4, $6
DATA order<>+24(SB)/4, $3
DATA order<>+28(SB)/4, $7
GLOBL order<>(SB), RODATA|NOPTR, $32

// Signs of what is added within a vector by the stages of width 1, 2 and 4.
DATA signs<>+0(SB)/8, $0x8000000000000000
DATA signs<>+8(SB)/8, $0x8000000000000000
DATA signs<>+16(SB)/8, $0x8000000000000000
DATA signs<>+24(SB)/8, $0x8000000000000000
DATA signs<>+32(SB)/8, $0
DATA signs<>+40(SB)/8, $0x8000000080000000
DATA signs<>+48(SB)/8, $0
DATA signs<>+56(SB)/8, $0x8000000080000000
DATA signs<>+64(SB)/8, $0
DATA signs<>+72(SB)/8, $0
DATA signs<>+80(SB)/8, $0x8000000080000000
DATA signs<>+88(SB)/8, $0x8000000080000000
GLOBL signs<>(SB), RODATA|NOPTR, $96

// ALL fills a vector with one number of 32 bits; it uses DX.
#define ALL(bits, x, y) \
	MOVL         bits, DX \
	VMOVD        DX, x    \
	VPBROADCASTD x, y

// func loadHalves(x []float32, src []byte) (done int)
TEXT ·loadHalves(SB), NOSPLIT, $0-56
	MOVQ x_base+0(FP), DI
	MOVQ x_len+8(FP), CX
	MOVQ src_base+24(FP), SI
	XORL AX, AX
	ANDQ $~15, CX
	ALL($0x7c007c00, X7, Y7)

loop:
	CMPQ AX, CX
	JGE  end

	// An exponent of ones is infinite or no number.
	VMOVDQU      (SI)(AX*2), Y0
	VPAND        Y7, Y0, Y1
	VPCMPEQW     Y7, Y1, Y1
	VPTEST       Y1, Y1
	JNZ          end
	VEXTRACTI128 $1, Y0, X1
	VCVTPH2PS    X0, Y0
	VCVTPH2PS    X1, Y1
	VMOVUPS      Y0, (DI)(AX*4)
	VMOVUPS      Y1, 32(DI)(AX*4)
	ADDQ         $16, AX
	JMP          loop

end:
	VZEROUPPER
	MOVQ AX, done+48(FP)
	RET

// func storeHalves(dst []byte, x []float32) (done int)
TEXT ·storeHalves(SB), NOSPLIT, $0-56
	MOVQ dst_base+0(FP), DI
	MOVQ x_base+24(FP), SI
	MOVQ x_len+32(FP), CX
	XORL AX, AX
	ANDQ $~7, CX
	ALL($0x7fffffff, X7, Y7)
	ALL($0x477fe000, X6, Y6) // 65504, the largest 16 bit float

loop:
	CMPQ AX, CX
	JGE  end

	// As integers, magnitudes are in the order of their values, and what is no
	// number is above them all.
	VMOVDQU   (SI)(AX*4), Y0
	VPAND     Y7, Y0, Y1
	VPANDN    Y0, Y7, Y0
	VPMINSD   Y6, Y1, Y1
	VPOR      Y1, Y0, Y0
	VCVTPS2PH $0, Y0, (DI)(AX*2) // 0: to the nearest, else to the even one
	ADDQ      $8, AX
	JMP       loop

end:
	VZEROUPPER
	MOVQ AX, done+48(FP)
	RET

// func widen(lo, hi, x []float32) (done int)
TEXT ·widen(SB), NOSPLIT, $0-80
	MOVQ lo_base+0(FP), DI
	MOVQ hi_base+24(FP), BX
	MOVQ x_base+48(FP), SI
	MOVQ x_len+56(FP), CX
	XORL AX, AX
	ANDQ $~7, CX

loop:
	CMPQ    AX, CX
	JGE     end
	VMOVUPS (SI)(AX*4), Y0
	VMINPS  (DI)(AX*4), Y0, Y1
	VMAXPS  (BX)(AX*4), Y0, Y2
	VMOVUPS Y1, (DI)(AX*4)
	VMOVUPS Y2, (BX)(AX*4)
	ADDQ    $8, AX
	JMP     loop

end:
	VZEROUPPER
	MOVQ AX, done+72(FP)
	RET

// func span(x []float32) (lo, hi float32, done int)
TEXT ·span(SB), NOSPLIT, $0-40
	MOVQ         x_base+0(FP), SI
	MOVQ         x_len+8(FP), CX
	XORL         AX, AX
	ANDQ         $~7, CX
	VBROADCASTSS (SI), Y0
	VMOVAPS      Y0, Y1

loop:
	CMPQ    AX, CX
	JGE     fold
	VMOVUPS (SI)(AX*4), Y2
	VMINPS  Y0, Y2, Y0
	VMAXPS  Y1, Y2, Y1
	ADDQ    $8, AX
	JMP     loop

fold:
	VEXTRACTF128 $1, Y0, X2
	VEXTRACTF128 $1, Y1, X3
	VMINPS       X2, X0, X0
	VMAXPS       X3, X1, X1
	VPERMILPS    $0x4e, X0, X2
	VPERMILPS    $0x4e, X1, X3
	VMINPS       X2, X0, X0
	VMAXPS       X3, X1, X1
	VPERMILPS    $0xb1, X0, X2
	VPERMILPS    $0xb1, X1, X3
	VMINPS       X2, X0, X0
	VMAXPS       X3, X1, X1
	VZEROUPPER
	MOVSS        X0, lo+24(FP)
	MOVSS        X1, hi+28(FP)
	MOVQ         AX, done+32(FP)
	RET

// SCALES gets ready for CODES and VALUES: R8 is the scales, R9 the offset of the next
// eight of them, R10 what keeps it in reach.
#define SCALES(k) \
	MOVQ k, R8                 \
	XORL R9, R9                \
	MOVQ scales_mask(R8), R10  \
	SHLQ $2, R10

#define NEXT \
	ADDQ $32, R9  \
	ANDQ R10, R9

// CODES makes eight numbers to codes. Y14 is 0.5 and Y15 the largest code.
#define CODES(at, y) \
	VMOVUPS    at(SI)(AX*4), y                 \
	VSUBPS     scales_least(R8)(R9*1), y, y    \
	VMULPS     scales_factor(R8)(R9*1), y, y   \
	VADDPS     Y14, y, y                       \
	VCVTTPS2DQ y, y                            \
	VPMINSD    Y15, y, y                       \
	NEXT

// PACK makes 32 numbers to as many bytes in Y0.
#define PACK \
	CODES(0, Y0)              \
	CODES(32, Y1)             \
	CODES(64, Y2)             \
	CODES(96, Y3)             \
	VPACKUSDW  Y1, Y0, Y0     \
	VPACKUSDW  Y3, Y2, Y2     \
	VPACKUSWB  Y2, Y0, Y0     \
	VPERMD     Y0, Y13, Y0

// func quantize8(dst []byte, x []float32, k *scales) (done int)
TEXT ·quantize8(SB), NOSPLIT, $0-64
	MOVQ    dst_base+0(FP), DI
	MOVQ    x_base+24(FP), SI
	MOVQ    x_len+32(FP), CX
	SCALES(k+48(FP))
	XORL    AX, AX
	ANDQ    $~31, CX
	VMOVDQU order<>(SB), Y13
	ALL($0x3f000000, X14, Y14)
	ALL($255, X15, Y15)

loop:
	CMPQ    AX, CX
	JGE     end
	PACK
	VMOVDQU Y0, (DI)(AX*1)
	ADDQ    $32, AX
	JMP     loop

end:
	VZEROUPPER
	MOVQ AX, done+56(FP)
	RET

// func quantize4(dst []byte, x []float32, k *scales) (done int)
TEXT ·quantize4(SB), NOSPLIT, $0-64
	MOVQ    dst_base+0(FP), DI
	MOVQ    x_base+24(FP), SI
	MOVQ    x_len+32(FP), CX
	SCALES(k+48(FP))
	XORL    AX, AX
	ANDQ    $~31, CX
	VMOVDQU order<>(SB), Y13
	ALL($0x3f000000, X14, Y14)
	ALL($15, X15, Y15)
	ALL($0x10011001, X12, Y12)

loop:
	CMPQ       AX, CX
	JGE        end
	PACK
	VPMADDUBSW Y12, Y0, Y0 // the first of two, and 16 times the second
	VPACKUSWB  Y0, Y0, Y0
	VPERMQ     $0x08, Y0, Y0
	VMOVDQU    X0, (DI)
	ADDQ       $16, DI
	ADDQ       $32, AX
	JMP        loop

end:
	VZEROUPPER
	MOVQ AX, done+56(FP)
	RET

// VALUES makes eight codes of 32 bits to numbers, and writes them.
#define VALUES(at, y) \
	VCVTDQ2PS y, y                             \
	VMULPS    scales_factor(R8)(R9*1), y, y    \
	VADDPS    scales_least(R8)(R9*1), y, y     \
	VMOVUPS   y, at(DI)(AX*4)                  \
	NEXT

// func dequantize8(x []float32, src []byte, k *scales) (done int)
TEXT ·dequantize8(SB), NOSPLIT, $0-64
	MOVQ x_base+0(FP), DI
	MOVQ x_len+8(FP), CX
	MOVQ src_base+24(FP), SI
	SCALES(k+48(FP))
	XORL AX, AX
	ANDQ $~7, CX

loop:
	CMPQ      AX, CX
	JGE       end
	VPMOVZXBD (SI)(AX*1), Y0
	VALUES(0, Y0)
	ADDQ      $8, AX
	JMP       loop

end:
	VZEROUPPER
	MOVQ AX, done+56(FP)
	RET

// func dequantize4(x []float32, src []byte, k *scales) (done int)
TEXT ·dequantize4(SB), NOSPLIT, $0-64
	MOVQ x_base+0(FP), DI
	MOVQ x_len+8(FP), CX
	MOVQ src_base+24(FP), SI
	SCALES(k+48(FP))
	XORL AX, AX
	ANDQ $~15, CX
	ALL($0x0f0f0f0f, X7, Y7)

loop:
	CMPQ      AX, CX
	JGE       end

	// Each byte becomes two, the low half first.
	VPMOVZXBW (SI), X0
	VPSLLW    $4, X0, X1
	VPOR      X1, X0, X0
	VPAND     X7, X0, X0
	VPSRLDQ   $8, X0, X1
	VPMOVZXBD X0, Y0
	VPMOVZXBD X1, Y1
	VALUES(0, Y0)
	VALUES(32, Y1)
	ADDQ      $8, SI
	ADDQ      $16, AX
	JMP       loop

end:
	VZEROUPPER
	MOVQ AX, done+56(FP)
	RET

// ADDSUB makes sums and differences within Y0: first + second, with the signs in y.
#define ADDSUB(first, second, y) \
	VPERMILPS first, Y0, Y1    \
	VPERMILPS second, Y0, Y2   \
	VXORPS    y, Y2, Y2        \
	VADDPS    Y2, Y1, Y0

// func hadamard(x []float32, width int, scale float32) (done int)
TEXT ·hadamard(SB), NOSPLIT, $0-48
	MOVQ         x_base+0(FP), DI
	MOVQ         x_len+8(FP), CX
	MOVQ         width+24(FP), R8
	VBROADCASTSS scale+32(FP), Y7
	XORL         AX, AX
	CMPQ         R8, $8
	JLT          end
	MOVQ         R8, DX
	NEGQ         DX
	ANDQ         DX, CX // whole runs only
	JZ           end
	VMOVUPS      signs<>+0(SB), Y4
	VMOVUPS      signs<>+32(SB), Y5
	VMOVUPS      signs<>+64(SB), Y6

	// Three stages within each vector.
inside:
	VMOVUPS    (DI)(AX*4), Y0
	ADDSUB($0xa0, $0xf5, Y4)
	ADDSUB($0x44, $0xee, Y5)
	VPERM2F128 $0x00, Y0, Y0, Y1
	VPERM2F128 $0x11, Y0, Y0, Y2
	VXORPS     Y6, Y2, Y2
	VADDPS     Y2, Y1, Y0
	VMOVUPS    Y0, (DI)(AX*4)
	ADDQ       $8, AX
	CMPQ       AX, CX
	JLT        inside

	// One stage at a time between vectors that are R9 numbers apart: SI runs over
	// the first ones, BX over the second, up to R11; then both skip what is done.
	MOVQ $8, R9

stage:
	CMPQ R9, R8
	JGE  scale
	MOVQ DI, SI
	LEAQ (DI)(CX*4), R10

run:
	LEAQ (SI)(R9*4), BX
	MOVQ BX, R11

pair:
	VMOVUPS (SI), Y0
	VMOVUPS (BX), Y1
	VADDPS  Y1, Y0, Y2
	VSUBPS  Y1, Y0, Y3
	VMOVUPS Y2, (SI)
	VMOVUPS Y3, (BX)
	ADDQ    $32, SI
	ADDQ    $32, BX
	CMPQ    SI, R11
	JLT     pair
	MOVQ    BX, SI
	CMPQ    SI, R10
	JLT     run
	SHLQ    $1, R9
	JMP     stage

scale:
	XORL AX, AX

scaled:
	VMULPS  (DI)(AX*4), Y7, Y0
	VMOVUPS Y0, (DI)(AX*4)
	ADDQ    $8, AX
	CMPQ    AX, CX
	JLT     scaled

end:
	VZEROUPPER
	MOVQ AX, done+40(FP)
	RET
