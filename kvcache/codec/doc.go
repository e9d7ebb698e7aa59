// Package codec makes KV state smaller: INT8 and INT4 in place of 16 or 32 bit
// floats, at a loss that docs/worker-kv.md measures on a real model. It works on one
// part of a frame at a time, needs no engine, and allocates nothing where the
// caller's buffer is large enough. All functions are safe for concurrent use.
//
// # What is quantized how
//
// A part is a matrix, one row for each token and one column for each channel, which
// the engine may precede with some bytes of its own. Numbers are quantized in groups
// of 64 that share a least value and a step: x ≈ least + step × code. Keys have a
// few channels with large values in every token, so their groups are 64 tokens of
// one channel; values have none, so theirs are 64 channels of one token. INT4
// rotates values by a Hadamard transform first, which spreads what is large over
// all numbers of a group. It is its own inverse. What it mixes is so alike that groups
// of 128 do as well where the transform is as wide, and codes that do not reach all of
// their numbers may do better (narrow in quant.go). The bytes that this saves INT4
// spends on one token: models attend most to the first, whatever it is, so FirstBlock
// leaves its keys and values as they are.
//
// # Format
//
// Little-endian; a version other than 1 and 2 is refused, and whoever changes the meaning
// of any byte raises it. The golden files in testdata hold one part of each kind. A part
// with wide groups has version 2, so that a reader which knows 1 only refuses it; one
// without has version 1, and means what it always did.
//
//	offset size
//	     0    1  version, 1 or 2
//	     1    1  type of the numbers: 1 f16, 2 f32
//	     2    1  groups: 0 of one token, 1 of one channel
//	     3    1  bits of a code: 8 or 4
//	     4    2  width of the transform, a power of two up to 256; 1 is none
//	     6    2  numbers of a group: 64 in version 1, and 128 of one token in version 2;
//	             the last of a row or column may have fewer
//	     8    4  rows, 1 to 65536
//	    12    4  columns, 1 to 65536
//	    16    4  p, the engine's bytes before the matrix, at most 4096
//	    20    4  0
//	    24    p  those bytes
//	          …  0 up to a multiple of 8
//	             steps and least values, in the type of the numbers
//	          …  0 up to a multiple of 8
//	             codes, row by row; each row begins with a byte of its own
//
// Groups of one token: for each row, for each group, step and least value. Groups of
// one channel: for each 64 rows the steps of all columns, then their least values.
// Of two codes of 4 bits in a byte the first is in the low half.
//
// A part has no checksum of its own; its frame has one for it.
//
// # Speed
//
// Numbers of 16 bits pass kernels in assembly where the processor has AVX2 and F16C
// (kernels_amd64.s). The methods in rows.go are the same in pure Go, and give the same
// bits; a change of one is a change of both.
package codec
