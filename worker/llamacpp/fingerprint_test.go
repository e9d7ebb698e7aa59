package llamacpp

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestFingerprintSeparatesParts(t *testing.T) {
	if fingerprint("ab", "c") == fingerprint("a", "bc") || fingerprint("a") == fingerprint("a", "") {
		t.Error("different lists of parts give one fingerprint")
	}
	if first, again := fingerprint("a", "b"), fingerprint("a", "b"); first != again {
		t.Error("the same parts give two fingerprints")
	}
}

// weights writes a file of n bytes, with one byte changed when at >= 0.
func weights(t *testing.T, n, at int) string {
	t.Helper()
	b := bytes.Repeat([]byte("weights!"), n/8+1)[:n]
	if at >= 0 {
		b[at] ^= 1
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func identify(t *testing.T, path, cache string) string {
	t.Helper()
	id, err := weightsID(path, cache)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestSampledIdentity(t *testing.T) {
	const n = 20 << 20
	base := identify(t, weights(t, n, -1), "")
	if again := identify(t, weights(t, n, -1), ""); again != base {
		t.Errorf("a copy elsewhere is %s, the original %s", again, base)
	}
	for name, other := range map[string]string{
		"head": weights(t, n, 0), "tail": weights(t, n, n-1), "longer": weights(t, n+1, -1),
		"an early block": weights(t, n, (n-sampleBytes)/(sampleCount-1)+5),
	} {
		if identify(t, other, "") == base {
			t.Errorf("a file with another %s has the same identity", name)
		}
	}
	for _, small := range []int{4, sampleBytes, sampleBytes + 1} {
		if identify(t, weights(t, small, -1), "") == identify(t, weights(t, small, small-1), "") {
			t.Errorf("a change in a file of %d bytes goes unseen", small)
		}
	}
}

func TestSplitModelIsAllItsFiles(t *testing.T) {
	dir := t.TempDir()
	first := filepath.Join(dir, "big-00001-of-00002.gguf")
	second := filepath.Join(dir, "big-00002-of-00002.gguf")
	for path, text := range map[string]string{first: "GGUF one", second: "GGUF two"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	base := identify(t, first, "")
	if err := os.WriteFile(second, []byte("GGUF 2nd"), 0o644); err != nil {
		t.Fatal(err)
	}
	if identify(t, first, "") == base {
		t.Error("a change in the second file goes unseen")
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if _, err := weightsID(first, ""); err == nil {
		t.Error("a missing second file goes unseen")
	}
}

func TestHashedIdentityIsRemembered(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "new", "cache")
	path := weights(t, 1<<20, -1)
	first := identify(t, path, cache)
	if !strings.HasPrefix(first, "sha256:") {
		t.Fatalf("identity with a cache is %s", first)
	}
	entries, err := os.ReadDir(cache)
	if err != nil || len(entries) != 1 {
		t.Fatalf("cache holds %v, %v; want one entry", entries, err)
	}
	// A remembered sum is believed while size and time of the file stay.
	sum := strings.Repeat("ab", 32)
	entry := filepath.Join(cache, entries[0].Name())
	if err := os.WriteFile(entry, []byte(sum), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := identify(t, path, cache); got != "sha256:"+sum {
		t.Errorf("identity is %s, want the remembered one", got)
	}
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if got := identify(t, path, cache); got != first {
		t.Errorf("after the file's time changed: %s, want %s", got, first)
	}
	if err := os.WriteFile(entry, []byte("torn"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := identify(t, path, cache); got != first {
		t.Errorf("with a torn cache entry: %s, want %s", got, first)
	}
	// Another file in its place, as cp -p, rsync -t and mv leave it: the same name, size and
	// time of writing.
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	other := weights(t, 1<<20, 5000)
	want := identify(t, other, "")
	replaced := weights(t, 1<<20, -1)
	if err := os.Chtimes(replaced, time.Time{}, st.ModTime()); err != nil {
		t.Fatal(err)
	}
	if got := identify(t, replaced, cache); got != first {
		t.Fatalf("a copy is %s, the original %s", got, first)
	}
	if err := errors.Join(os.Rename(other, replaced), os.Chtimes(replaced, time.Time{}, st.ModTime())); err != nil {
		t.Fatal(err)
	}
	if got := identify(t, replaced, cache); got == first || identify(t, replaced, "") != want {
		t.Errorf("another file of the same size and time is %s", got)
	}
	blocked := filepath.Join(path, "cannot be a folder")
	if got := identify(t, path, blocked); got != first {
		t.Errorf("with a cache that cannot be written: %s, want %s", got, first)
	}
}
