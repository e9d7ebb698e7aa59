package arena

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// mapped is how much of a file is in the page tables of this process, in bytes, by its
// mappings without the right to write.
func mapped(t *testing.T, path string) (sum int64) {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	in := false
	for sc := bufio.NewScanner(f); sc.Scan(); {
		line := sc.Text()
		if first, _, _ := strings.Cut(line, " "); strings.Contains(first, "-") {
			in = strings.Contains(line, " r--s ") && strings.HasSuffix(line, path)
		}
		var kb int64
		if n, _ := fmt.Sscanf(line, "Rss: %d kB", &kb); in && n == 1 {
			sum += kb << 10
		}
	}
	return sum
}

// TestFill: after Fill no page of the arena has to be asked for any more, and nothing is
// filled that would have to be taken, or whose reader has ended.
func TestFill(t *testing.T) {
	space := kvcache.NewSpace("m", nil)
	for _, prefault := range []bool{true, false} {
		t.Run(fmt.Sprint(prefault), func(t *testing.T) {
			limit := int64(32 << 20)
			if !prefault {
				limit = 3 * step // the first block takes one
			}
			s := newStore(t, Config{Dir: shmDir(t), Limit: limit, Prefault: prefault})
			f := sealed(t, space, space.Root, 1, 100)
			put(t, s, f)
			r := newReader(t, s.cfg.Dir)
			l, err := borrow(t, s, r, f.Ref)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release()
			if n := mapped(t, s.Data()); n == 0 || n > limit/2 {
				t.Fatalf("%d bytes are mapped after one small block: the test proves nothing", n)
			}
			if err := r.Fill(context.Background(), Loan{Data: s.Data(), ID: s.ID()}); err != nil {
				t.Fatal(err)
			}
			var st unix.Stat_t
			if err := unix.Stat(s.Data(), &st); err != nil {
				t.Fatal(err)
			}
			n := mapped(t, s.Data())
			if prefault && n < limit {
				t.Errorf("%d bytes of %d are mapped", n, limit)
			}
			if taken := st.Blocks * 512; !prefault && (taken > limit/2 || n > limit/2) {
				t.Errorf("%d bytes were taken, and %d are mapped", taken, n)
			}
			if err := l.Verify(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestFillLater fills what is mapped later, and ends with its reader.
func TestFillLater(t *testing.T) {
	const limit = 16 << 20
	s := newStore(t, Config{Dir: shmDir(t), Limit: limit, Prefault: true})
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 100)
	put(t, s, f)
	r := newReader(t, s.cfg.Dir)
	if err := r.Fill(context.Background(), Loan{Data: s.Data(), ID: [16]byte{1}}); err == nil {
		t.Error("another arena was mapped")
	}
	l, err := borrow(t, s, r, f.Ref) // maps it, and it is to be filled
	if err != nil {
		t.Fatal(err)
	}
	<-r.filling(r.view)
	if n := mapped(t, s.Data()); n < limit {
		t.Errorf("%d bytes of %d are mapped", n, limit)
	}
	l.Release()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	other := newReader(t, s.cfg.Dir)
	if err := other.Fill(ctx, Loan{Data: s.Data(), ID: s.ID()}); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	other.Close()
	<-other.filling(other.view)
	r.Close()
	if n := mapped(t, s.Data()); n != 0 {
		t.Errorf("%d bytes are mapped after both readers have ended", n)
	}
}
