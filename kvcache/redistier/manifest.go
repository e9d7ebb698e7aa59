package redistier

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The manifest's form; see the package comment.
const (
	manifestMagic   = "KVRM"
	manifestVersion = 1
	manifestFixed   = 48
	maxParts        = 1 << 16
)

// nonce is the number of one writing of a block.
type nonce [16]byte

func newNonce() (n nonce) {
	rand.Read(n[:]) // never fails
	return n
}

// manifest says where the parts of a block are.
type manifest struct {
	nonce nonce
	// part is the length of each part but the last.
	part   int64
	header kvcache.Header
}

// parts is how many there are.
func (m *manifest) parts() int { return int((m.header.Total + m.part - 1) / m.part) }

// size is the length of part i.
func (m *manifest) size(i int) int64 { return min(m.part, m.header.Total-int64(i)*m.part) }

// encode writes a manifest of the frame that begins with the header's bytes.
func (m *manifest) encode(header []byte) []byte {
	b := make([]byte, manifestFixed, manifestFixed+len(header))
	le := binary.LittleEndian
	copy(b, manifestMagic)
	le.PutUint16(b[4:], manifestVersion)
	le.PutUint32(b[12:], uint32(m.parts()))
	le.PutUint64(b[16:], uint64(m.part))
	le.PutUint64(b[24:], uint64(m.header.Total))
	copy(b[32:], m.nonce[:])
	b = append(b, header...)
	le.PutUint32(b[8:], manifestSum(b))
	return b
}

// manifestSum is the checksum of a manifest without the field that holds it.
func manifestSum(b []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by the package
	return crc32.Update(crc32.Checksum(b[:8], table), table, b[12:])
}

// parseManifest reads a manifest and the header in it. It believes nothing; every error
// is a *kvcache.Refusal. It keeps nothing of b.
func parseManifest(b []byte, form kvcache.Form) (manifest, error) {
	le := binary.LittleEndian
	switch {
	case len(b) < manifestFixed:
		return manifest{}, kvcache.Refuse(kvcache.ReasonTorn, "%d bytes of a manifest", len(b))
	case string(b[:4]) != manifestMagic:
		return manifest{}, kvcache.Refuse(kvcache.ReasonMagic, "no manifest")
	case le.Uint16(b[4:]) != manifestVersion:
		return manifest{}, kvcache.Refuse(kvcache.ReasonVersion, "manifest of version %d, this reader knows %d", le.Uint16(b[4:]), manifestVersion)
	case manifestSum(b) != le.Uint32(b[8:]):
		return manifest{}, kvcache.Refuse(kvcache.ReasonChecksum, "manifest")
	}
	h, err := form.DecodeHeader(b[manifestFixed:])
	if err != nil {
		return manifest{}, err
	}
	m := manifest{part: int64(le.Uint64(b[16:])), header: h}
	copy(m.nonce[:], b[32:])
	if int64(len(b)) != manifestFixed+h.Len || le.Uint64(b[24:]) != uint64(h.Total) ||
		m.part < 1 || (h.Total-1)/m.part >= maxParts || m.parts() != int(le.Uint32(b[12:])) {
		return manifest{}, kvcache.Refuse(kvcache.ReasonTorn, "manifest of %d bytes: %d parts of %d for a frame of %d",
			len(b), le.Uint32(b[12:]), m.part, h.Total)
	}
	return m, nil
}

// keys names everything of one store.
type keys struct{ prefix string }

func (k keys) manifest(key kvcache.Key) string    { return k.prefix + ":b:{" + key.String() + "}" }
func (k keys) children(parent kvcache.Key) string { return k.prefix + ":c:{" + parent.String() + "}" }

func (k keys) part(key kvcache.Key, n nonce, i int) string {
	return fmt.Sprintf("%s:%s:%d", k.manifest(key), hex.EncodeToString(n[:]), i)
}

// all names the manifest and the parts of a block.
func (k keys) all(m *manifest) []string {
	list := []string{k.manifest(m.header.Key)}
	for i := range m.parts() {
		list = append(list, k.part(m.header.Key, m.nonce, i))
	}
	return list
}

// lru names the three keys of the count.
func (k keys) lru() []string {
	return []string{k.prefix + ":{lru}:at", k.prefix + ":{lru}:size", k.prefix + ":{lru}:used"}
}
