package nvmetier

import (
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// block is what a file's name says of the block in it.
type block struct {
	parent kvcache.Key
	key    kvcache.Key
	// first is the position of the first token.
	first, tokens int
	size          int64 // of the frame in bytes
	put           int64 // in seconds since 1970
	// begin is the first tokens, as many as n says.
	begin [remote.MaxBegin]int32
	n     int
}

// blockOf describes a block that is written now.
func blockOf(h *kvcache.Header, now int64) block {
	b := block{parent: h.Parent, key: h.Key, first: h.First, tokens: len(h.IDs), size: h.Total, put: now}
	b.n = copy(b.begin[:], h.IDs)
	return b
}

// entry is a block as look-ups know it, whatever the index does with its place meanwhile.
func (b *block) entry() remote.Entry {
	return remote.Entry{Key: b.key, First: b.first, Tokens: b.tokens, Begin: slices.Clone(b.begin[:b.n])}
}

// name writes the name; see the package comment.
func (b *block) name() string {
	var begin [4 * remote.MaxBegin]byte
	for i, id := range b.begin[:b.n] {
		binary.BigEndian.PutUint32(begin[4*i:], uint32(id))
	}
	text := base64.RawURLEncoding.EncodeToString
	return strings.Join([]string{
		strconv.FormatInt(b.put, 10), strconv.Itoa(b.first), strconv.Itoa(b.tokens), strconv.FormatInt(b.size, 10),
		text(begin[:4*b.n]), text(b.parent[:]), text(b.key[:]),
	}, ".")
}

// parseName reads what name wrote; false = it is no block's. It believes nothing: others
// may have put files there.
func parseName(name string) (b block, ok bool) {
	f := strings.Split(name, ".")
	if len(f) != 7 {
		return b, false
	}
	var errs [7]error
	b.put, errs[0] = strconv.ParseInt(f[0], 10, 64)
	b.first, errs[1] = strconv.Atoi(f[1])
	b.tokens, errs[2] = strconv.Atoi(f[2])
	b.size, errs[3] = strconv.ParseInt(f[3], 10, 64)
	begin, err := base64.RawURLEncoding.DecodeString(f[4])
	errs[4], errs[5], errs[6] = err, parseKey(&b.parent, f[5]), parseKey(&b.key, f[6])
	for _, err := range errs {
		if err != nil {
			return b, false
		}
	}
	b.n = min(b.tokens, remote.MaxBegin)
	if b.tokens < 1 || b.tokens > kvcache.MaxTokens || b.first < 0 || b.size < 1 || b.size > kvcache.MaxSize || len(begin) != 4*b.n {
		return b, false
	}
	for i := range b.n {
		b.begin[i] = int32(binary.BigEndian.Uint32(begin[4*i:]))
	}
	// One block has one name.
	return b, b.name() == name
}

// parseKey reads a key in base64url.
func parseKey(k *kvcache.Key, text string) error {
	if len(text) != base64.RawURLEncoding.EncodedLen(len(k)) {
		return base64.CorruptInputError(0)
	}
	_, err := base64.RawURLEncoding.Decode(k[:], []byte(text))
	return err
}

// compareBegin orders blocks by their first tokens; a beginning comes before the whole.
func compareBegin(a, b []int32) int {
	for i := range min(len(a), len(b)) {
		if x, y := uint32(a[i]), uint32(b[i]); x != y {
			if x < y {
				return -1
			}
			return 1
		}
	}
	return len(a) - len(b)
}
