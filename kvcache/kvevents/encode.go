package kvevents

import "github.com/tinylib/msgp/msgp"

// Encoding is how events are written. The zero Encoding is that of vLLM 0.32.
type Encoding struct {
	// Arrays writes events as arrays, as older versions of vLLM do.
	Arrays bool
	// Numbers writes hashes as numbers; see Hash.Number.
	Numbers bool
}

// Append writes a batch behind b.
func (c Encoding) Append(b []byte, batch *Batch) []byte {
	b = msgp.AppendFloat64(msgp.AppendArrayHeader(b, 3), batch.Time)
	b = msgp.AppendArrayHeader(b, uint32(len(batch.Events)))
	for i := range batch.Events {
		b = c.event(b, &batch.Events[i])
	}
	return msgp.AppendInt(b, batch.Rank)
}

// event writes one event.
func (c Encoding) event(b []byte, e *Event) []byte {
	fields := fieldsOf(e.Kind)
	// Those at the end that say nothing are left out, as vLLM does.
	if n := len(fields); n > 0 && e.Group == 0 {
		if fields = fields[:n-1]; e.Kind == BlockStored && e.Extra == nil {
			fields = fields[:n-2]
		}
	}
	if c.Arrays {
		b = msgp.AppendString(msgp.AppendArrayHeader(b, uint32(1+len(fields))), e.Kind.String())
	} else {
		b = msgp.AppendMapHeader(b, uint32(1+len(fields)))
		b = msgp.AppendString(msgp.AppendString(b, "type"), e.Kind.String())
	}
	for _, name := range fields {
		if !c.Arrays {
			b = msgp.AppendString(b, name)
		}
		b = c.field(b, e, name)
	}
	return b
}

// field writes the value of a field.
func (c Encoding) field(b []byte, e *Event, name string) []byte {
	switch name {
	case "block_hashes":
		b = msgp.AppendArrayHeader(b, uint32(len(e.Hashes)))
		for _, h := range e.Hashes {
			b = c.hash(b, h)
		}
		return b
	case "parent_block_hash":
		return c.hash(b, e.Parent)
	case "token_ids":
		b = msgp.AppendArrayHeader(b, uint32(len(e.IDs)))
		for _, id := range e.IDs {
			b = msgp.AppendUint64(b, uint64(id))
		}
		return b
	case "block_size":
		return msgp.AppendInt(b, e.BlockSize)
	case "medium":
		return text(b, e.Medium)
	case "lora_name":
		return text(b, e.LoRA)
	case "extra_keys":
		return extra(b, e.Extra)
	case "group_idx":
		return msgp.AppendInt(b, e.Group)
	}
	return msgp.AppendNil(b) // lora_id, which is of use to nobody
}

// extra writes extra keys, which are written already.
func extra(b []byte, keys [][]byte) []byte {
	if keys == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(keys)))
	for _, k := range keys {
		if k == nil {
			b = msgp.AppendNil(b)
		} else {
			b = append(b, k...)
		}
	}
	return b
}

// text writes a text, and none as nil.
func text(b []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, s)
}

// hash writes a hash, and none as nil.
func (c Encoding) hash(b []byte, h Hash) []byte {
	switch {
	case h.IsZero():
		return msgp.AppendNil(b)
	case h.num || c.Numbers:
		return msgp.AppendUint64(b, h.Number())
	}
	return msgp.AppendBytes(b, h.Bytes())
}
