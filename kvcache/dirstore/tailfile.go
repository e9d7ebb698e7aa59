//go:build unix

package dirstore

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The format of tail files, see the package comment.
const (
	tailMagic     = "KVMT"
	tailVersion   = 1
	tailHeaderLen = 192
	recordMagic   = "KVMR"
	recordFixed   = 56
	// maxRange keeps a record's header smaller than a page.
	maxRange = 512
	// dataAlign is that of the data in the file.
	dataAlign = 64
)

// tailHeader writes the header of a tail file.
func tailHeader(spec kvcache.TailSpec) []byte {
	b := make([]byte, tailHeaderLen)
	le := binary.LittleEndian
	copy(b, tailMagic)
	le.PutUint16(b[4:], tailVersion)
	le.PutUint32(b[12:], uint32(spec.Choice))
	le.PutUint64(b[16:], uint64(spec.Attempt))
	le.PutUint64(b[24:], uint64(spec.First))
	copy(b[32:], spec.Fingerprint[:])
	copy(b[64:], spec.Root[:])
	copy(b[96:], spec.Parent[:])
	stream := sha256.Sum256([]byte(spec.Stream))
	copy(b[128:], stream[:])
	le.PutUint32(b[8:], sumWithout(b, 8))
	return b
}

// sumWithout is the CRC32C of b without the four bytes at offset at.
func sumWithout(b []byte, at int) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by the package
	return crc32.Update(crc32.Checksum(b[:at], table), table, b[at+4:])
}

// parsedTail is the header of a tail file: a spec whose stream is only known by
// its hash.
type parsedTail struct {
	kvcache.TailSpec
	stream [sha256.Size]byte
}

// parseTailHeader reads what tailHeader wrote; every error is a *kvcache.Refusal.
func parseTailHeader(b []byte) (h parsedTail, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) < tailHeaderLen:
		return h, &kvcache.Refusal{Reason: kvcache.ReasonTorn, Detail: "header of a tail"}
	case string(b[:4]) != tailMagic:
		return h, &kvcache.Refusal{Reason: kvcache.ReasonMagic, Detail: "no tail"}
	case le.Uint16(b[4:]) != tailVersion:
		return h, &kvcache.Refusal{Reason: kvcache.ReasonVersion, Detail: "version of a tail"}
	case sumWithout(b[:tailHeaderLen], 8) != le.Uint32(b[8:]):
		return h, &kvcache.Refusal{Reason: kvcache.ReasonChecksum, Detail: "header of a tail"}
	}
	h.Choice, h.Attempt, h.First = int(le.Uint32(b[12:])), int(le.Uint64(b[16:])), int(le.Uint64(b[24:]))
	copy(h.Fingerprint[:], b[32:])
	copy(h.Root[:], b[64:])
	copy(h.Parent[:], b[96:])
	copy(h.stream[:], b[128:])
	return h, nil
}

// appendRecord writes the header of a record at an offset of the file.
func appendRecord(b []byte, at int64, r kvcache.Range) []byte {
	size := int(align(at+int64(recordFixed+4*len(r.IDs)), dataAlign) - at)
	b = slices.Grow(b, size)[:size]
	clear(b)
	le := binary.LittleEndian
	copy(b, recordMagic)
	le.PutUint32(b[8:], uint32(size))
	le.PutUint32(b[12:], uint32(len(r.IDs)))
	le.PutUint64(b[16:], uint64(at))
	le.PutUint64(b[24:], uint64(r.First))
	le.PutUint64(b[32:], uint64(len(r.Data)))
	le.PutUint64(b[40:], kvcache.Sum(r.Data))
	b[48] = byte(r.Codec)
	for i, id := range r.IDs {
		le.PutUint32(b[recordFixed+4*i:], uint32(id))
	}
	le.PutUint32(b[4:], sumWithout(b, 4))
	return b
}

// align rounds up to a multiple of a power of two.
func align(n, to int64) int64 { return (n + to - 1) &^ (to - 1) }

// errEnd says that no record begins here: the end of the tail, or a record that
// is being written or never was finished.
var errEnd = errors.New("end of the tail")

// parseRecord reads the record at an offset of a tail file whose next token is at
// position first, and returns where the next one begins. The data is b's.
func parseRecord(b []byte, at int64, first int) (r kvcache.Range, end int64, err error) {
	le := binary.LittleEndian
	if at > int64(len(b))-recordFixed || string(b[at:at+4]) != recordMagic {
		return r, 0, errEnd
	}
	h := b[at:]
	size, n, length := int64(le.Uint32(h[8:])), int64(le.Uint32(h[12:])), int64(le.Uint64(h[32:]))
	// In this order nothing is read behind the end of b, whatever the lengths say.
	if n < 1 || n > maxRange || size != align(at+recordFixed+4*n, dataAlign)-at || size > int64(len(h)) ||
		sumWithout(h[:size], 4) != le.Uint32(h[4:]) {
		return r, 0, errEnd
	}
	if int64(le.Uint64(h[16:])) != at || int(le.Uint64(h[24:])) != first || length < 1 || length > int64(len(h))-size {
		return r, 0, errEnd
	}
	r = kvcache.Range{First: first, IDs: make([]int32, n), Codec: kvcache.Codec(h[48]), Data: h[size : size+length : size+length]}
	if r.Codec != kvcache.CodecRaw {
		return r, 0, &kvcache.Refusal{Reason: kvcache.ReasonCodec, Detail: "range of a tail"}
	}
	if kvcache.Sum(r.Data) != le.Uint64(h[40:]) {
		return r, 0, &kvcache.Refusal{Reason: kvcache.ReasonChecksum, Detail: "range of a tail"}
	}
	for i := range r.IDs {
		r.IDs[i] = int32(le.Uint32(h[recordFixed+4*i:]))
	}
	return r, at + size + length, nil
}

// tailFile is what a tail file's name says.
type tailFile struct{ choice, attempt, seq int }

// tailName is the name of a tail file in its stream's folder.
func tailName(choice, attempt, seq int) string {
	return fmt.Sprintf("c%x-a%x-s%x", choice, attempt, seq)
}

// parseTailName reads what tailName wrote.
func parseTailName(name string) (n tailFile, ok bool) {
	parts := strings.Split(name, "-")
	if len(parts) != 3 {
		return n, false
	}
	for i, to := range []*int{&n.choice, &n.attempt, &n.seq} {
		digits, found := strings.CutPrefix(parts[i], string("cas"[i]))
		v, err := strconv.ParseInt(digits, 16, 64)
		if !found || err != nil {
			return n, false
		}
		*to = int(v)
	}
	return n, true
}

// ReadTail implements kvcache.Tails.
func (s *Store) ReadTail(ctx context.Context, space kvcache.Space, stream string, choice int) ([]kvcache.Tail, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.leave()
	dir := streamDir(space.Fingerprint, stream)
	names, err := s.names(dir)
	if err != nil {
		return nil, s.failed(fmt.Errorf("read tail: %w", err))
	}
	var files []tailFile
	for _, name := range names {
		if n, ok := parseTailName(name); ok && n.choice == choice {
			files = append(files, n)
		}
	}
	// The highest attempt is the likeliest to be what the caller looks for, and
	// within it the last rotation.
	slices.SortFunc(files, func(a, b tailFile) int {
		return cmp.Or(cmp.Compare(b.attempt, a.attempt), cmp.Compare(b.seq, a.seq))
	})
	var tails []kvcache.Tail
	for _, n := range files {
		want := kvcache.TailSpec{Space: space, Stream: stream, Choice: choice, Attempt: n.attempt}
		t, err := s.readTail(dir+"/"+tailName(choice, n.attempt, n.seq), want)
		if err != nil {
			// One that cannot be read does not hide the others.
			if _, ok := s.refused(err); !ok && !errors.Is(err, fs.ErrNotExist) {
				s.failed(err)
			}
			continue
		}
		tails = append(tails, t)
	}
	return tails, nil
}

// readTail reads the valid part of one tail file.
func (s *Store) readTail(name string, want kvcache.TailSpec) (kvcache.Tail, error) {
	// Copied rather than mapped: the writer may be at work on the last page.
	b, err := s.root.ReadFile(name)
	if err != nil {
		return kvcache.Tail{}, err
	}
	t, end, err := parseTail(b, want)
	if err == nil {
		s.countEnd(end)
	}
	return t, err
}

// parseTail reads the valid part of a tail file, which ends where end says:
// io.EOF with the file, errEnd at a record that is not finished, a
// *kvcache.Refusal at a wrong one. The ranges refer to b. The error is a
// *kvcache.Refusal of all of it, if it is not the tail wanted.
func parseTail(b []byte, want kvcache.TailSpec) (t kvcache.Tail, end, err error) {
	h, err := parseTailHeader(b)
	if err != nil {
		return t, nil, err
	}
	if h.Space != want.Space {
		return t, nil, &kvcache.Refusal{Reason: kvcache.ReasonForeign, Detail: "tail of another model or tenant"}
	}
	if h.Choice != want.Choice || h.Attempt != want.Attempt || h.stream != sha256.Sum256([]byte(want.Stream)) {
		return t, nil, &kvcache.Refusal{Reason: kvcache.ReasonKey, Detail: "tail of another stream"}
	}
	h.Stream = want.Stream
	t.TailSpec = h.TailSpec
	for at, next := int64(tailHeaderLen), h.First; at < int64(len(b)); {
		r, after, err := parseRecord(b, at, next)
		if err != nil {
			return t, err, nil
		}
		t.Ranges = append(t.Ranges, r)
		at, next = after, next+len(r.IDs)
	}
	return t, io.EOF, nil
}

// countEnd counts why a tail ended before its file did. A record that is being
// written in this moment counts as torn too.
func (s *Store) countEnd(end error) {
	if _, ok := s.refused(end); !ok && end == errEnd {
		s.count.refused[kvcache.ReasonTorn].Add(1)
	}
}

// readTailHeader reads the header of a tail file alone.
func (s *Store) readTailHeader(name string) (parsedTail, error) {
	f, err := s.root.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return parsedTail{}, err
	}
	defer f.Close()
	var b [tailHeaderLen]byte
	n, err := f.ReadAt(b[:], 0)
	if err != nil && err != io.EOF {
		return parsedTail{}, err
	}
	return parseTailHeader(b[:n])
}
