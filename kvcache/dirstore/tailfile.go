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
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// The format of tail files, see the package comment.
const (
	tailMagic     = "KVMT"
	tailVersion   = 1
	tailHeaderLen = 192
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
		return nil, s.count.Failure(fmt.Errorf("read tail: %w", err))
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
			if _, ok := s.count.Refusal(err); !ok && !errors.Is(err, fs.ErrNotExist) {
				s.count.Failure(err)
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
	b, err := s.readFile(name, s.cfg.Limit)
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
// io.EOF with the file, tailrec.ErrEnd at a record that is not finished, a
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
		r, after, err := tailrec.Parse(b, at, tailrec.Want{Mark: uint64(at), First: next})
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
	if _, ok := s.count.Refusal(end); !ok && end == tailrec.ErrEnd {
		s.count.Refused[kvcache.ReasonTorn].Add(1)
	}
}

// readTailHeader reads the header of a tail file alone.
func (s *Store) readTailHeader(name string) (parsedTail, error) {
	f, err := s.openRegular(name, os.O_RDONLY)
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
