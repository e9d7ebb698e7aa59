package remote

import (
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/kvcache"
)

// MaxBegin is how many tokens the name of a block tells.
const MaxBegin = 16

// Entry is a block as its name among its parent's children describes it.
type Entry struct {
	Key kvcache.Key
	// First is the position of the first token, and Tokens how many there are.
	First, Tokens int
	// Begin is the first tokens, MaxBegin or all.
	Begin []int32
}

// EntryOf is the entry of a block.
func EntryOf(h *kvcache.Header) Entry {
	return Entry{Key: h.Key, First: h.First, Tokens: len(h.IDs), Begin: h.IDs[:min(MaxBegin, len(h.IDs))]}
}

// Name writes an entry as package remote says.
func (e Entry) Name() string {
	return Prefix(e.Begin, MaxBegin) + "-" + strconv.Itoa(e.Tokens) + "-" + strconv.Itoa(e.First) + "-" + e.Key.String()
}

// Prefix is what the names of all blocks begin with whose first n tokens, at most
// MaxBegin, are those of ids. Fewer ids give a shorter prefix.
func Prefix(ids []int32, n int) string {
	n = min(n, MaxBegin, len(ids))
	b := make([]byte, 0, 4*MaxBegin)
	for _, id := range ids[:n] {
		b = binary.BigEndian.AppendUint32(b, uint32(id))
	}
	return hex.EncodeToString(b)
}

// ParseName reads what Name wrote; false = it is no name of a block. It believes
// nothing: names come from a server that others may write to.
func ParseName(name string) (e Entry, ok bool) {
	fields := strings.Split(name, "-")
	if len(fields) != 4 {
		return Entry{}, false
	}
	begin, err1 := hex.DecodeString(fields[0])
	tokens, err2 := strconv.Atoi(fields[1])
	first, err3 := strconv.Atoi(fields[2])
	key, err4 := kvcache.ParseKey(fields[3])
	if err1 != nil || err2 != nil || err3 != nil || err4 != nil || tokens < 1 || tokens > kvcache.MaxTokens || first < 0 ||
		len(begin) != 4*min(tokens, MaxBegin) {
		return Entry{}, false
	}
	e = Entry{Key: key, First: first, Tokens: tokens}
	for ; len(begin) > 0; begin = begin[4:] {
		e.Begin = append(e.Begin, int32(binary.BigEndian.Uint32(begin)))
	}
	// One block has one name: a sign, a leading zero or a capital is none of ours.
	return e, e.Name() == name
}
