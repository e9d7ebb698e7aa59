// Package kvcache keeps KV state: the attention keys and values that an engine
// computed for a run of tokens, so that another engine need not compute them
// again. It knows blocks and tails, not who asks for them, and nothing in it
// needs a GPU or an engine.
//
// # Keys
//
// A block is the state of a fixed run of tokens, all layers. Its key is a chain
// hash, so that equal keys mean equal tokens from the first one on, computed by
// equal weights in an equal layout. All hashes are SHA-256; integers are
// little-endian; the quoted text is ASCII, and \0 is one zero byte.
//
//	fingerprint = H("kvmesh kv fingerprint v1\0" text)
//	root        = H("kvmesh kv root v1\0" fingerprint[32] salt)
//	key         = H("kvmesh kv block v1\0" fingerprint[32] root[32] parent[32] n:u32 id:u32 × n)
//
// The text of the fingerprint names the weights' hash, the engine's build and
// its layout of the state, its type and context parameters, and the adapter; the
// salt is the tenant's. The parent of a first block is the root. Another model,
// layout, adapter or tenant therefore never reaches a block, and a block that is
// handed out for another key is noticed by its reader. That each key has root and
// fingerprint in it, and not only through its parents, lets a reader prove them
// from one frame alone.
//
// # Frame
//
// A block is stored and sent as one frame. Version 1, little-endian:
//
//	offset size
//	     0    4  magic "KVMB"
//	     4    2  version, 1
//	     6    2  flags, 0
//	     8    4  CRC32C (Castagnoli) of bytes [0,8) and [12,header length)
//	    12    4  header length, a multiple of 64; the payload begins there
//	    16    8  total length of the frame
//	    24    8  position of the first token in its sequence
//	    32    4  n, the number of tokens, 1 to 65536
//	    36    4  p, the number of parts, 1 to 4096
//	    40   32  fingerprint
//	    72   32  root
//	   104   32  parent's key
//	   136   32  key
//	   168    8  0
//	   176   4n  token ids
//	           …  0 up to a multiple of 8
//	         48p  parts
//	           …  0 up to a multiple of 64
//
// and one part:
//
//	 0    2  state group, in the engine's own numbering
//	 2    2  first layer
//	 4    2  number of layers, 0 for what belongs to no layer
//	 6    1  kind: 0 positional, 1 windowed, 2 snapshot
//	 7    1  plane: 0 all, 1 keys, 2 values, 3 the engine's description
//	 8    1  codec: 0 raw, 1 INT8, 2 INT4; see package codec for the bytes of the last two
//	 9    3  0
//	12    4  window in tokens of a windowed group, else 0
//	16    8  offset from the start of the frame
//	24    8  length
//	32    8  XXH3-64 of its bytes, seed 0
//	40    8  0
//
// The parts follow each other without a gap, in the order of the index, and end
// with the frame: the payload as a whole is what the engine wrote, and each part
// can be read and verified alone. Every byte of a frame is covered: the header,
// with its padding, by the CRC, and the payload by the sums in the header.
//
// Version 2 is the same for a frame that is encrypted: ids and the three keys are what
// stands for those of the plain frame, so the key is not that of the ids, and the parts
// are what package sealed says. A store keeps frames of one version only; see Form.
//
// The llamacpp engine's blocks have one part for the description and one for the keys
// and the values of each layer; windowed layers are a group of their own, in which layers
// count from 0. Header.PartsOf finds those of a range of layers. What an engine's
// format does not tell apart is one part.
//
// # Layers
//
// GetLayers lends some layers of a block, and ReadLayers those of a chain, in order or the
// newest first, as far as the time goes. A store that has the bytes elsewhere is Ranged: it
// reads the header and the parts that are wanted, those near each other in one go, and what it
// lends says ErrAbsent of the others. Each part that is there is verified as ever. A store that
// lends its own memory has nothing to gain by that, so it lends the whole block, and what is not
// looked at costs nothing. Encrypted frames are whole, since their pieces are not their parts.
//
// Version rule: whoever changes the meaning, the place or the order of any byte
// raises the version. A reader refuses every version and codec that it does not
// know, which its caller sees as a miss; there is no conversion, because a cache
// fills again. The golden files in testdata hold one frame of each version.
//
// # Tails
//
// The tokens after the last full block of a stream have no key yet. They are in
// a tail: an append-only slot per stream, choice and attempt, which grows after
// every token and is read only when its writer is gone. An attempt is a number
// that the relay issues; a writer with a lower one than the store has seen is
// refused, so that a worker that wakes up late cannot write over its successor.
//
// # Epochs
//
// Fingerprints keep the versions of a model apart; an Epoch says which of them is the one of
// today, so that the room of the others can be given back at once instead of by age. It goes
// by the weights alone, because one version has several fingerprints: those of its codecs, of
// the ranks of an engine, of two builds of it.
//
//	announced    was          becomes
//	never seen   epoch n      epoch n+1, and everything that epoch n had is old
//	of epoch n   epoch n      epoch n, with one fingerprint more if it is new
//	of before    epoch n      epoch n: a worker of before still runs, or runs again
//
// Who wants weights of before back says so (Next). A record is a value and knows no clock and
// no store; who keeps it, and what is done about what is old, is package kvnode's matter.
//
// # Refusal
//
// A store may lose blocks at any time. It must not hand out a wrong one: what is
// torn, flipped, foreign or unknown is refused with a Reason, counted, and
// deleted where it is not another's. Callers then compute the tokens again.
package kvcache
