package sealed

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The form of an encrypted frame; see the package comment.
const (
	metaLen  = 80
	saltAt   = 16
	lengthAt = 48
	pieceAt  = 56
	tagLen   = 16
	// unit is what the length of a piece is a multiple of.
	unit = 1 << 20

	infoNames  = "kvmesh sealed names v1"
	infoToken1 = "kvmesh sealed tokens 1 v1"
	infoToken2 = "kvmesh sealed tokens 2 v1"
	infoFrame  = "kvmesh sealed frame v1"
	infoHeader = "kvmesh sealed header v1"
)

// secret is one key of a tenant with what follows from it. It is safe for concurrent use.
type secret struct {
	id             string
	key            [32]byte
	names          []byte
	token1, token2 cipher.Block
}

// newSecret derives what is needed. The id has 16 bytes at most.
func newSecret(id string, key [32]byte) (*secret, error) {
	s := &secret{id: id, key: key}
	var err error
	derive := func(info string) (b []byte) {
		if err == nil {
			b, err = hkdf.Key(sha256.New, key[:], nil, info, 32)
		}
		return b
	}
	s.names = derive(infoNames)
	one, two := derive(infoToken1), derive(infoToken2)
	if err == nil {
		s.token1, err = aes.NewCipher(one)
	}
	if err == nil {
		s.token2, err = aes.NewCipher(two)
	}
	return s, err
}

// name is what stands for a key or a root.
func (s *secret) name(k kvcache.Key) (out kvcache.Key) {
	h := hmac.New(sha256.New, s.names)
	h.Write(k[:])
	h.Sum(out[:0])
	return out
}

// space is what stands for a tenant's space, and ref for a block.
func (s *secret) space(sp kvcache.Space) kvcache.Space {
	return kvcache.Space{Fingerprint: sp.Fingerprint, Root: s.name(sp.Root)}
}

func (s *secret) ref(r kvcache.Ref) kvcache.Ref {
	return kvcache.Ref{Space: s.space(r.Space), Parent: s.name(r.Parent), Key: s.name(r.Key)}
}

// run makes what stands for tokens, one after another.
type run struct {
	s     *secret
	state [aes.BlockSize]byte
}

// run begins behind a plain parent.
func (s *secret) run(parent kvcache.Key) *run {
	r := &run{s: s}
	for _, half := range [][]byte{parent[:16], parent[16:]} {
		for i, b := range half {
			r.state[i] ^= b
		}
		s.token1.Encrypt(r.state[:], r.state[:])
	}
	return r
}

// next is what stands for the next token.
func (r *run) next(id int32) int32 {
	le := binary.LittleEndian
	le.PutUint32(r.state[:], le.Uint32(r.state[:])^uint32(id))
	r.s.token1.Encrypt(r.state[:], r.state[:])
	var out [aes.BlockSize]byte
	r.s.token2.Encrypt(out[:], r.state[:])
	return int32(le.Uint32(out[:]))
}

// tokens is what stands for the tokens of a block.
func (s *secret) tokens(parent kvcache.Key, ids []int32) []int32 {
	r, out := s.run(parent), make([]int32, len(ids))
	for i, id := range ids {
		out[i] = r.next(id)
	}
	return out
}

// pieceLen is the length of the pieces of a frame.
func pieceLen(total int64) int64 {
	most := int64(kvcache.MaxParts - 1)
	least := (total + most - 1) / most
	return max(1, (least+unit-1)/unit) * unit
}

// pieces is how many there are.
func pieces(total int64) int { return int((total + pieceLen(total) - 1) / pieceLen(total)) }

// sizeOf is the length of the encrypted frame of a plain one.
func sizeOf(total int64, tokens int) int64 {
	n := pieces(total)
	return int64(kvcache.HeaderLen(tokens, 1+n)) + metaLen + total + int64(n)*tagLen
}

// plainSize is the length of the plain frame in an encrypted one of so many bytes, if
// there can be one. From 4 GiB on, where pieces get longer, two lengths may have one size,
// and it is one of them.
func plainSize(size int64, tokens int) (int64, bool) {
	for n := max(1, pieces(size)-2); n <= pieces(size)+1; n++ {
		total := size - int64(kvcache.HeaderLen(tokens, 1+n)) - metaLen - int64(n)*tagLen
		if total > 0 && sizeOf(total, tokens) == size {
			return total, true
		}
	}
	return 0, false
}

// bound is what all pieces of a frame are bound to.
func bound(m *kvcache.Meta, key kvcache.Key, meta []byte) []byte {
	b := append([]byte(infoHeader), m.Fingerprint[:]...)
	for _, k := range []kvcache.Key{m.Root, m.Parent, key} {
		b = append(b, k[:]...)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(m.First))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.IDs)))
	for _, id := range m.IDs {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	sum := sha256.Sum256(append(b, meta...))
	return sum[:]
}

// aead is the cipher of one frame.
func (s *secret) aead(salt []byte, key kvcache.Key) (cipher.AEAD, error) {
	k, err := hkdf.Key(sha256.New, s.key[:], salt, infoFrame+string(key[:]), 32)
	if err != nil {
		return nil, err
	}
	b, err := aes.NewCipher(k)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(b)
}

// nonce is that of piece i of n.
func nonce(i, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(i))
	last := byte(0)
	if i == n-1 {
		last = 1
	}
	return append(b, 0, 0, 0, last)
}

// seal encrypts a frame.
func (s *secret) seal(f *kvcache.Frame, salt [32]byte) (*kvcache.Frame, error) {
	plain := f.Bytes()
	total := int64(len(plain))
	if total != f.Total {
		return nil, kvcache.ErrClosed // it was lent and given back
	}
	n, piece := pieces(total), pieceLen(total)
	ref := s.ref(f.Ref)
	m := kvcache.Meta{Space: ref.Space, Parent: ref.Parent, First: f.First, IDs: s.tokens(f.Parent, f.IDs)}
	meta := make([]byte, metaLen)
	copy(meta, s.id)
	copy(meta[saltAt:], salt[:])
	binary.LittleEndian.PutUint64(meta[lengthAt:], uint64(total))
	binary.LittleEndian.PutUint64(meta[pieceAt:], uint64(piece))
	aead, err := s.aead(salt[:], ref.Key)
	if err != nil {
		return nil, fmt.Errorf("encrypt a block: %w", err)
	}
	head := kvcache.HeaderLen(len(m.IDs), 1+n)
	buf := append(make([]byte, head, sizeOf(total, len(m.IDs))), meta...)
	parts := []kvcache.Part{{Plane: kvcache.PlaneMeta, Size: metaLen}}
	aad := bound(&m, ref.Key, meta)
	for i := range n {
		from := int64(i) * piece
		to := min(total, from+piece)
		buf = aead.Seal(buf, nonce(i, n), plain[from:to], aad)
		parts = append(parts, kvcache.Part{Size: to - from + tagLen})
	}
	return kvcache.SealEncrypted(buf, m, ref.Key, parts)
}

// errOpen is why a frame is refused; it never says more.
var errOpen = errors.New("cannot be opened with the tenant's key")

// open decrypts a frame that the store has lent, and checks that it is that of a block;
// nil = of any block in the place of this one. Every error is a refusal, or one of the store.
func (s *secret) open(f *kvcache.Frame, want *kvcache.Ref) (*kvcache.Frame, error) {
	plain, err := s.decrypt(f)
	if err != nil {
		if errors.Is(err, errOpen) {
			err = kvcache.Refuse(kvcache.ReasonChecksum, "%v", err)
		}
		return nil, err
	}
	h, err := kvcache.DecodeHeader(plain)
	if err != nil {
		return nil, err
	}
	// Whoever has the key has written it, and may have been wrong.
	if s.ref(h.Ref) != f.Ref || h.First != f.First || len(h.IDs) != len(f.IDs) {
		return nil, kvcache.Refuse(kvcache.ReasonKey, "another block than its header says")
	}
	if want == nil {
		want = &h.Ref
	}
	return kvcache.Decode(plain, *want)
}

// decrypt returns the plain frame.
func (s *secret) decrypt(f *kvcache.Frame) ([]byte, error) {
	if len(f.Parts) < 2 || f.Parts[0].Size != metaLen {
		return nil, errOpen
	}
	meta, err := f.Part(0)
	if err != nil {
		return nil, err
	}
	total := int64(binary.LittleEndian.Uint64(meta[lengthAt:]))
	if total < 1 || total > f.Total || sizeOf(total, len(f.IDs)) != f.Total || len(f.Parts) != 1+pieces(total) ||
		int64(binary.LittleEndian.Uint64(meta[pieceAt:])) != pieceLen(total) {
		return nil, errOpen
	}
	aead, err := s.aead(meta[saltAt:lengthAt], f.Key)
	if err != nil {
		return nil, fmt.Errorf("decrypt a block: %w", err)
	}
	m := kvcache.Meta{Space: f.Space, Parent: f.Parent, First: f.First, IDs: f.IDs}
	aad, n := bound(&m, f.Key, meta), pieces(total)
	plain := make([]byte, 0, total)
	for i := range n {
		b, err := f.Part(1 + i)
		if err != nil {
			return nil, err
		}
		if int64(len(b)) > total-int64(len(plain))+tagLen {
			return nil, errOpen
		}
		if plain, err = aead.Open(plain, nonce(i, n), b, aad); err != nil {
			return nil, errOpen
		}
	}
	return plain, nil
}
