package kvcache

import (
	"bytes"
	"errors"
	"slices"
	"testing"
)

// reasonOf returns the reason of a refusal; any other error fails the test.
func reasonOf(t *testing.T, err error) Reason {
	t.Helper()
	r, ok := errors.AsType[*Refusal](err)
	if !ok {
		t.Fatalf("%v is no refusal", err)
	}
	return r.Reason
}

// readAll decodes a frame and verifies all of it.
func readAll(b []byte, want Ref) ([]byte, error) {
	f, err := Decode(b, want)
	if err != nil {
		return nil, err
	}
	return f.Payload()
}

// TestEveryBit flips each bit of a frame: none may go unnoticed.
func TestEveryBit(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	b := f.Bytes()
	reasons := map[Reason]int{}
	for i := range 8 * len(b) {
		b[i/8] ^= 1 << (i % 8)
		if _, err := readAll(b, f.Ref); err == nil {
			t.Fatalf("bit %d of byte %d can flip", i%8, i/8)
		} else {
			reasons[reasonOf(t, err)]++
		}
		b[i/8] ^= 1 << (i % 8)
	}
	if _, err := readAll(b, f.Ref); err != nil {
		t.Fatal(err)
	}
	for _, r := range []Reason{ReasonTorn, ReasonMagic, ReasonVersion, ReasonChecksum} {
		if reasons[r] == 0 {
			t.Errorf("no flip was refused as %v: %v", r, reasons)
		}
	}
}

// TestEveryLength cuts a frame at each length, and lengthens it.
func TestEveryLength(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	for n := range f.Total {
		if _, err := readAll(f.Bytes()[:n:n], f.Ref); err == nil {
			t.Errorf("%d of %d bytes pass", n, f.Total)
		} else if r := reasonOf(t, err); r != ReasonTorn {
			t.Errorf("%d bytes: %v", n, r)
		}
	}
	for _, more := range [][]byte{{0}, make([]byte, 64), f.Bytes()} {
		if _, err := readAll(append(slices.Clone(f.Bytes()), more...), f.Ref); err == nil || reasonOf(t, err) != ReasonTorn {
			t.Errorf("%d bytes more: %v", len(more), err)
		}
	}
}

// TestForeign offers a whole frame for what it is not.
func TestForeign(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	other := NewSpace("another model", []byte("tenant"))
	for name, c := range map[string]struct {
		change func(*Ref)
		want   Reason
	}{
		"fingerprint": {func(r *Ref) { r.Fingerprint = other.Fingerprint }, ReasonForeign},
		"tenant":      {func(r *Ref) { r.Root = f.Fingerprint.Root([]byte("tenant 2")) }, ReasonForeign},
		"space":       {func(r *Ref) { r.Space = other }, ReasonForeign},
		"key":         {func(r *Ref) { r.Key[31]++ }, ReasonKey},
		"parent":      {func(r *Ref) { r.Parent[0]++ }, ReasonKey},
	} {
		want := f.Ref
		c.change(&want)
		if _, err := Decode(f.Bytes(), want); err == nil || reasonOf(t, err) != c.want {
			t.Errorf("other %s: %v, want %v", name, err, c.want)
		}
	}
}

// reseal writes a changed header with a checksum that fits, as a wrong or hostile
// writer could.
func reseal(b []byte, change func(h []byte)) []byte {
	b = slices.Clone(b)
	need, _ := HeaderNeed(b)
	h := b[:need]
	change(h)
	sum := headerSum(h)
	h[8], h[9], h[10], h[11] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
	return b
}

// TestWrongWriter: what the checksum covers may still be wrong.
func TestWrongWriter(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	index := align(fixedLen+4*len(f.IDs), 8)
	for name, c := range map[string]struct {
		change func(h []byte)
		want   Reason
	}{
		"nothing":            {func([]byte) {}, reasons},
		"token":              {func(h []byte) { h[fixedLen]++ }, ReasonKey},
		"key":                {func(h []byte) { h[140]++ }, ReasonKey},
		"parent":             {func(h []byte) { h[110]++ }, ReasonKey},
		"fingerprint":        {func(h []byte) { h[50]++ }, ReasonKey},
		"no tokens":          {func(h []byte) { h[32] = 0 }, ReasonTorn},
		"one token more":     {func(h []byte) { h[32]++ }, ReasonKey},
		"many tokens":        {func(h []byte) { h[35] = 0xff }, ReasonTorn},
		"no parts":           {func(h []byte) { h[36] = 0 }, ReasonTorn},
		"many parts":         {func(h []byte) { h[39] = 0xff }, ReasonTorn},
		"negative position":  {func(h []byte) { h[31] = 0x80 }, ReasonTorn},
		"part behind frame":  {func(h []byte) { h[index+partLen+31] = 0x7f }, ReasonTorn},
		"negative part":      {func(h []byte) { h[index+31] = 0x80 }, ReasonTorn},
		"part in the header": {func(h []byte) { h[index+16]-- }, ReasonTorn},
		"part left out":      {func(h []byte) { h[index+3*partLen+24]-- }, ReasonTorn},
		"codec":              {func(h []byte) { h[index+8] = byte(codecs) }, ReasonCodec},
		"total":              {func(h []byte) { h[23] = 0x7f }, ReasonTorn},
	} {
		_, err := readAll(reseal(f.Bytes(), c.change), f.Ref)
		if c.want == reasons {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		} else if err == nil || reasonOf(t, err) != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestPartsAlone: a part can be read although another is wrong.
func TestPartsAlone(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	f.Bytes()[f.Parts[1].Offset] ^= 1
	for i, want := range [][]byte{payload[:4], nil, {}, payload[44:]} {
		got, err := f.Part(i)
		if (err != nil) != (i == 1) || !bytes.Equal(got, want) {
			t.Errorf("part %d: %q, %v", i, got, err)
		}
	}
	if err := f.Verify(); err == nil || reasonOf(t, err) != ReasonChecksum {
		t.Error(err)
	}
	if b, err := f.Payload(); err == nil || b != nil {
		t.Error("a payload with a wrong part was handed out")
	}
}

// TestPayloadIsRaw: what is encoded is not handed out as what the engine wrote.
func TestPayloadIsRaw(t *testing.T) {
	meta, parts, payload := goldenFrame()
	parts[1].Codec, parts[3].Codec = CodecInt4, CodecInt8
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	g, err := Decode(f.Bytes(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := g.Payload(); b != nil || reasonOf(t, err) != ReasonCodec {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if b, err := g.Part(1); err != nil || !bytes.Equal(b, payload[4:44]) || g.Codec() != CodecInt4 {
		t.Errorf("part %q of codec %v, %v", b, g.Codec(), err)
	}
}

func TestCodecNames(t *testing.T) {
	for c := range codecs {
		if got, err := ParseCodec(c.String()); err != nil || got != c {
			t.Errorf("%v is read as %v, %v", c, got, err)
		}
	}
	if _, err := ParseCodec(codecs.String()); err == nil {
		t.Error("an unknown codec is read")
	}
}

func TestSealRefusesNonsense(t *testing.T) {
	meta, parts, payload := goldenFrame()
	for name, change := range map[string]func(*Meta, *[]Part){
		"no tokens":         func(m *Meta, _ *[]Part) { m.IDs = nil },
		"many tokens":       func(m *Meta, _ *[]Part) { m.IDs = make([]int32, MaxTokens+1) },
		"no parts":          func(_ *Meta, p *[]Part) { *p = nil },
		"many parts":        func(_ *Meta, p *[]Part) { *p = make([]Part, MaxParts+1) },
		"negative position": func(m *Meta, _ *[]Part) { m.First = -1 },
		"part too long":     func(_ *Meta, p *[]Part) { (*p)[0].Size = 1 << 20 },
		"negative part":     func(_ *Meta, p *[]Part) { (*p)[0].Size = -1 },
		"bytes without one": func(_ *Meta, p *[]Part) { (*p)[3].Size-- },
		"codec":             func(_ *Meta, p *[]Part) { (*p)[0].Codec = codecs },
	} {
		m, p := meta, slices.Clone(parts)
		change(&m, &p)
		if f, err := Encode(nil, m, p, payload); err == nil {
			t.Errorf("%s: sealed as %+v", name, f.Header)
		}
	}
	if _, err := Seal(make([]byte, 100), meta, parts); err == nil {
		t.Error("sealed in less room than a header needs")
	}
}

// TestSealCopiesNothing: the payload stays where the engine wrote it, and the
// buffer can be used again.
func TestSealCopiesNothing(t *testing.T) {
	meta, parts, payload := goldenFrame()
	n := HeaderLen(len(meta.IDs), len(parts))
	buf := make([]byte, n+len(payload))
	for i := range buf[:n] {
		buf[i] = 0xee // left over from another frame
	}
	copy(buf[n:], payload)
	f, err := Seal(buf, meta, parts)
	if err != nil {
		t.Fatal(err)
	}
	if &f.Bytes()[0] != &buf[0] {
		t.Error("the frame is elsewhere")
	}
	if !bytes.Equal(f.Bytes(), readGolden(t, "frame-v1.hex")) {
		t.Error("what was in the buffer shows")
	}
	allocs := testing.AllocsPerRun(100, func() {
		if _, err := Seal(buf, meta, parts); err != nil {
			t.Error(err)
		}
	})
	if allocs > 1 {
		t.Errorf("%v allocations for a view", allocs)
	}
}

// TestHeaderAlone: an index reads headers without payloads.
func TestHeaderAlone(t *testing.T) {
	b := readGolden(t, "frame-v1.hex")
	need, err := HeaderNeed(b[:24])
	if err != nil {
		t.Fatal(err)
	}
	h, err := DecodeHeader(b[:need])
	if err != nil || len(h.IDs) != 3 || h.Total != int64(len(b)) || h.Len != int64(need) {
		t.Errorf("%+v, %v", h, err)
	}
	for n := range need {
		if _, err := DecodeHeader(b[:n]); err == nil || reasonOf(t, err) != ReasonTorn {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	clear(b)
	if h.IDs[0] != 1 || h.Parts[1].Size != 40 {
		t.Error("the header refers to what it was read from")
	}
}

func TestReasons(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Reasons() {
		if s := r.String(); seen[s] || s == "" || s == Reason(99).String() {
			t.Errorf("reason %d is called %q", r, s)
		} else {
			seen[s] = true
		}
	}
}

func TestLent(t *testing.T) {
	meta, parts, payload := goldenFrame()
	f, err := Encode(nil, meta, parts, payload)
	if err != nil {
		t.Fatal(err)
	}
	f.Bytes()[f.Parts[0].Offset]++
	var told []error
	released := 0
	l := NewLent(f, func() { released++ }, func(err error) { told = append(told, err) })
	if _, err := l.Part(1); err != nil || len(told) != 0 {
		t.Error(err, told)
	}
	if err := l.Verify(); err == nil || len(told) != 1 {
		t.Error(err, told)
	}
	l.Release()
	l.Release()
	if released != 1 {
		t.Errorf("released %d times", released)
	}
	if _, err := l.Part(1); !errors.Is(err, ErrClosed) {
		t.Errorf("part after release: %v", err)
	}
}

// FuzzDecode feeds frames, changed and invented. What passes must be what its
// key says, and nothing may panic or allocate by a length that is not proven.
func FuzzDecode(f *testing.F) {
	meta, parts, payload := goldenFrame()
	golden, err := Encode(nil, meta, parts, payload)
	if err != nil {
		f.Fatal(err)
	}
	b := golden.Bytes()
	f.Add(b, 0, byte(0))
	f.Add(b[:200], 3, byte(1))
	f.Add([]byte{}, 0, byte(0))
	for i := range 16 {
		f.Add(b, i*len(b)/16, byte(1<<(i%8)))
	}
	f.Fuzz(func(t *testing.T, b []byte, at int, flip byte) {
		if len(b) > 0 {
			b = slices.Clone(b)
			b[uint(at)%uint(len(b))] ^= flip
		}
		got, err := readAll(b, golden.Ref)
		if err != nil {
			reasonOf(t, err)
		} else if !bytes.Equal(b, golden.Bytes()) || !bytes.Equal(got, payload) {
			t.Errorf("another frame passes for this block: %x", b)
		}
		// The same behind a checksum that fits.
		if need, err := HeaderNeed(b); err == nil && need <= len(b) {
			if h, err := DecodeHeader(reseal(b, func([]byte) {})); err == nil && h.Space.Key(h.Parent, h.IDs) != h.Key {
				t.Errorf("a key that is not that of its tokens: %+v", h)
			}
		}
	})
}
