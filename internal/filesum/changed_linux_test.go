package filesum

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestAnotherFileOfTheSameTimes: a file with other bytes has another hash, whether it was
// moved over the first or written into it, also where its size and time of writing were
// made those of the first, as cp -p and rsync -t do.
func TestAnotherFileOfTheSameTimes(t *testing.T) {
	for how, put := range map[string]func(name string) error{
		"moved over": func(name string) error {
			if err := os.WriteFile(name+".new", []byte("other"), 0o644); err != nil {
				return err
			}
			return os.Rename(name+".new", name)
		},
		"written into": func(name string) error { return os.WriteFile(name, []byte("other"), 0o644) },
	} {
		name, cache := filepath.Join(t.TempDir(), "f"), t.TempDir()
		write(t, name, "first")
		first, err := SHA256(t.Context(), name, cache)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		// The system's clock of files moves in steps.
		for now := st; changedAt(t, now) == changedAt(t, st); {
			probe := filepath.Join(t.TempDir(), "probe")
			write(t, probe, "x")
			if now, err = os.Stat(probe); err != nil {
				t.Fatal(err)
			}
		}
		if err := put(name); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(name, st.ModTime(), st.ModTime()); err != nil {
			t.Fatal(err)
		}
		got, err := SHA256(t.Context(), name, cache)
		want, _ := SHA256(t.Context(), name, "") // as above
		if err != nil || got == first || got != want {
			t.Errorf("%s: %s, %v; want %s", how, got, err, want)
		}
	}
}

// changedAt is when a file was last changed in any way.
func changedAt(t *testing.T, st os.FileInfo) int64 {
	t.Helper()
	s, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		t.Fatal("no times here")
	}
	return s.Ctim.Nano()
}
