package llamacpp

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// wantWords checks that an error is there and says each of the words.
func wantWords(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one that says %q", words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func TestLibDirErrorsNameWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	names := libraryNames()
	wantWords(t, checkLibDir(filepath.Join(dir, "none")), "none")
	wantWords(t, checkLibDir(dir), names[0], names[1], names[2], engineVersion)
	for _, n := range names[:2] {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libllama.v9.so", filepath.Join(dir, names[2])); err != nil {
		t.Fatal(err)
	}
	err := checkLibDir(dir)
	wantWords(t, err, names[2], "link to libllama.v9.so")
	if strings.Contains(err.Error(), names[0]) {
		t.Errorf("%q names a file that is there", err)
	}
	wantWords(t, checkLibDir(filepath.Join(dir, names[0])), "not a directory")
}

func TestModelFileMustBeGGUF(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.gguf")
	_, err := checkModelFile(path)
	wantWords(t, err, "m.gguf", "no such file")
	for _, content := range []string{"", "GG", "<html>not found</html>"} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := checkModelFile(path)
		wantWords(t, err, "m.gguf", "not a GGUF file")
	}
	if err := os.WriteFile(path, []byte("GGUF\x03\x00\x00\x00"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := checkModelFile(path); err != nil {
		t.Errorf("a file that begins like GGUF: %v", err)
	}
}

func TestVersionPair(t *testing.T) {
	for got, ok := range map[string]bool{
		"0.5.0": true, "0.4.0": true, "0.4.0-dev": true, "0.4.1": false, "0.5.0-dev": true, "0.5.1": false, "0.6.0-dev": false, "0.5.01": false, "": false, "1.0.5.0": false,
	} {
		err := checkVersion("dir", got)
		if (err == nil) != ok {
			t.Errorf("version %q: %v, want ok %v", got, err, ok)
		}
		if err != nil {
			wantWords(t, err, "dir", engineVersion, "yzma")
		}
	}
}

func TestLoaderErrorsNamePackages(t *testing.T) {
	for text, pkg := range map[string]string{
		"libstdc++.so.6: cannot open shared object file: No such file or directory": "libstdc++6",
		"libffi.so.8: cannot open shared object file: No such file or directory":    "libffi8",
		"libgomp.so.1: cannot open shared object file: No such file or directory":   "libgomp1",
	} {
		wantWords(t, explainLoad(errors.New(text)), "apt-get install "+pkg, text)
	}
	other := errors.New("libfoo.so.1: cannot open shared object file")
	if got := explainLoad(other); got != other {
		t.Errorf("an unknown library: %v, want the error as it is", got)
	}
}

func TestOpenValidates(t *testing.T) {
	_, err := Open(context.Background(), Config{})
	wantWords(t, err, "LibDir", "ModelPath")
}
