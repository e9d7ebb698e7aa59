package openai

import (
	"slices"
	"strconv"
)

// InsertTokens adds vLLM's field token_ids to the choice of an event that one of
// c's methods has appended to dst at the index at.
func (c *Chunks) InsertTokens(dst []byte, at int, ids []int32) []byte {
	raw := append(make([]byte, 0, 16+8*len(ids)), `"token_ids":[`...)
	for i, id := range ids {
		if i > 0 {
			raw = append(raw, ',')
		}
		raw = strconv.AppendInt(raw, int64(id), 10)
	}
	return c.insert(dst, at, append(raw, "],"...))
}

// InsertKV adds the field kvmesh to the choice of an event, as InsertTokens does: how
// the choice went on from delivered tokens.
func (c *Chunks) InsertKV(dst []byte, at int, mode string, restored, computed int) []byte {
	raw := AppendString([]byte(`"kvmesh":{"kv":`), []byte(mode))
	raw = strconv.AppendInt(append(raw, `,"restored":`...), int64(restored), 10)
	raw = strconv.AppendInt(append(raw, `,"computed":`...), int64(computed), 10)
	return c.insert(dst, at, append(raw, "},"...))
}

// insert puts members in front of the others of an event's choice.
func (c *Chunks) insert(dst []byte, at int, members []byte) []byte {
	return slices.Insert(dst, at+len(c.head)+1, members...) // 1 for the brace of the choice
}
