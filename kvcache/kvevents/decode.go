package kvevents

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// errFormat is in the errors of bytes that are no batch.
var errFormat = errors.New("no batch of KV events")

// fieldsOf are the fields of an event of a kind, in the order in which arrays have them. Later
// ones, which vLLM has, are not read: the kind of attention and its window, where the block is
// relative to the publisher, whose it is, and the session that asked for it.
func fieldsOf(k Kind) []string {
	switch k {
	case BlockStored:
		return []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx"}
	case BlockRemoved:
		return []string{"block_hashes", "medium", "group_idx"}
	}
	return nil
}

// Decode reads a batch, whose events may be maps or arrays, and hashes bytes or numbers. It
// keeps nothing of b. Fields that are not known are passed over, and so are events whose kind
// is not, which are counted.
func Decode(b []byte) (Batch, error) {
	batch, err := decodeBatch(b)
	if err != nil {
		return Batch{}, fmt.Errorf("%w: %w", errFormat, err)
	}
	return batch, nil
}

// decodeBatch reads the fields of a batch. The rank is not there in old versions, and later
// versions may have more fields at the end.
func decodeBatch(b []byte) (batch Batch, err error) {
	fields, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return batch, err
	}
	if fields < 2 {
		return batch, fmt.Errorf("%d fields", fields)
	}
	if batch.Time, b, err = msgp.ReadFloat64Bytes(b); err != nil {
		return batch, fmt.Errorf("time: %w", err)
	}
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return batch, fmt.Errorf("events: %w", err)
	}
	hashes := 0
	for i := range n {
		var e Event
		var known bool
		if e, known, b, err = decodeEvent(b); err != nil {
			return batch, fmt.Errorf("event %d: %w", i, err)
		}
		if hashes += len(e.Hashes); hashes > mostHashes {
			return batch, fmt.Errorf("more than %d hashes", mostHashes)
		}
		if known {
			batch.Events = append(batch.Events, e)
		} else {
			batch.Unknown++
		}
	}
	if fields > 2 {
		if batch.Rank, b, err = readCount(b); err != nil {
			return batch, fmt.Errorf("rank: %w", err)
		}
	}
	for range max(fields, 3) - 3 {
		if b, err = msgp.Skip(b); err != nil {
			return batch, err
		}
	}
	if len(b) > 0 {
		return batch, fmt.Errorf("%d bytes follow it", len(b))
	}
	return batch, nil
}

// mostHashes is how many hashes a batch may have: 2 million tokens in blocks of 16. A number can be one
// byte there and is 34 in memory.
const mostHashes = 128 << 10

// decodeEvent reads one event, in either form.
func decodeEvent(b []byte) (e Event, known bool, rest []byte, err error) {
	switch t := msgp.NextType(b); t {
	case msgp.MapType:
		return decodeMap(b)
	case msgp.ArrayType:
		return decodeArray(b)
	default:
		return e, false, nil, fmt.Errorf("a %s", t)
	}
}

// decodeMap reads an event that is a map. Its type may stand anywhere in it, and what the
// other fields are depends on it.
func decodeMap(b []byte) (e Event, known bool, rest []byte, err error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return e, false, nil, err
	}
	tag, values, all := "", map[string][]byte{}, fieldsOf(BlockStored) // which has those of the others, too
	for range n {
		var name string
		if name, b, err = msgp.ReadStringBytes(b); err != nil {
			return e, false, nil, err
		}
		rest, err := msgp.Skip(b)
		if err != nil {
			return e, false, nil, fmt.Errorf("%.32q: %w", name, err)
		}
		if name == "type" {
			if tag, _, err = msgp.ReadStringBytes(b); err != nil {
				return e, false, nil, fmt.Errorf("type: %w", err)
			}
		} else if slices.Contains(all, name) {
			values[name] = b[:len(b)-len(rest)]
		}
		b = rest
	}
	fields, known := e.begin(tag)
	for _, name := range fields {
		if v, ok := values[name]; ok {
			if err := e.set(name, v); err != nil {
				return e, false, nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return e, known, b, e.check()
}

// decodeArray reads an event that is an array.
func decodeArray(b []byte) (e Event, known bool, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return e, false, nil, err
	}
	if n == 0 {
		return e, false, nil, errors.New("empty")
	}
	tag, b, err := msgp.ReadStringBytes(b)
	if err != nil {
		return e, false, nil, fmt.Errorf("type: %w", err)
	}
	fields, known := e.begin(tag)
	for i := range int(n - 1) {
		rest, err := msgp.Skip(b)
		if err == nil && i < len(fields) {
			err = e.set(fields[i], b[:len(b)-len(rest)])
		}
		if err != nil {
			return e, false, nil, fmt.Errorf("field %d: %w", i+1, err)
		}
		b = rest
	}
	return e, known, b, e.check()
}

// begin begins an event of a type and returns the fields that it may have.
func (e *Event) begin(tag string) (fields []string, known bool) {
	for k := BlockStored; k <= AllBlocksCleared; k++ {
		if tag == k.String() {
			e.Kind = k
			return fieldsOf(k), true
		}
	}
	return nil, false
}

// check says whether what was read makes an event.
func (e *Event) check() error {
	switch {
	case e.Kind != BlockStored:
		return nil
	case e.Extra != nil && len(e.Extra) != len(e.Hashes):
		return fmt.Errorf("%d extra keys of %d blocks", len(e.Extra), len(e.Hashes))
	case e.BlockSize < 0 || len(e.IDs) > 0 && (e.BlockSize == 0 || len(e.IDs) != len(e.Hashes)*e.BlockSize):
		return fmt.Errorf("%d tokens in %d blocks of %d", len(e.IDs), len(e.Hashes), e.BlockSize)
	}
	return nil
}

// set reads a field, whose bytes are one whole object.
func (e *Event) set(name string, v []byte) (err error) {
	if msgp.IsNil(v) {
		return nil
	}
	switch name {
	case "block_hashes":
		e.Hashes, err = readHashes(v)
	case "parent_block_hash":
		e.Parent, _, err = readHash(v)
	case "token_ids":
		e.IDs, err = readIDs(v)
	case "block_size":
		e.BlockSize, _, err = readCount(v)
	case "medium":
		e.Medium, _, err = msgp.ReadStringBytes(v)
	case "lora_name":
		e.LoRA, _, err = msgp.ReadStringBytes(v)
	case "extra_keys":
		e.Extra, err = readExtra(v)
	case "group_idx":
		e.Group, _, err = readCount(v)
	}
	return err
}

// readCount reads a number that is not negative; nil is 0.
func readCount(b []byte) (int, []byte, error) {
	if msgp.IsNil(b) {
		return 0, b[1:], nil
	}
	n, b, err := msgp.ReadInt64Bytes(b)
	if err == nil && (n < 0 || n > math.MaxInt32) {
		err = fmt.Errorf("%d is out of range", n)
	}
	return int(n), b, err
}

// readHash reads a hash of bytes or a number. Which of them it is does not depend on the rest
// of the batch: engines of one mesh may differ.
func readHash(b []byte) (h Hash, rest []byte, err error) {
	if msgp.NextType(b) == msgp.BinType {
		v, rest, err := msgp.ReadBytesZC(b)
		if err != nil {
			return h, nil, err
		}
		h, ok := HashOf(v)
		if !ok {
			err = fmt.Errorf("a hash of %d bytes", len(v))
		}
		return h, rest, err
	}
	n, rest, err := msgp.ReadUint64Bytes(b)
	return HashNumber(n), rest, err
}

// readHashes reads a list of hashes, whose bytes are all there: the field was passed over
// once, so the length at its beginning is no promise.
func readHashes(b []byte) (hashes []Hash, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, err
	}
	if n > mostHashes {
		return nil, fmt.Errorf("%d hashes", n)
	}
	hashes = make([]Hash, n)
	for i := range hashes {
		if hashes[i], b, err = readHash(b); err != nil {
			return nil, err
		}
	}
	return hashes, nil
}

// readIDs reads token ids, of which engines have no negative ones.
func readIDs(b []byte) (ids []int32, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return nil, err
	}
	ids = make([]int32, n)
	for i := range ids {
		var id int
		if id, b, err = readCount(b); err != nil {
			return nil, err
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

// readExtra reads the extra keys of blocks. What they are only the engine knows (names,
// positions of pictures, digests), so they stay as they were written, and are compared as such.
func readExtra(b []byte) (extra [][]byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return nil, err
	}
	if n > mostHashes {
		return nil, fmt.Errorf("%d keys", n)
	}
	extra = make([][]byte, n)
	for i := range extra {
		rest, err := msgp.Skip(b)
		if err != nil {
			return nil, err
		}
		if !msgp.IsNil(b) {
			extra[i] = slices.Clone(b[:len(b)-len(rest)])
		}
		b = rest
	}
	return extra, nil
}
