// Package filesum hashes large files and folders of them, and remembers the hashes: a
// model is hashed once, not at each start.
package filesum

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// SHA256 returns the SHA-256 of a file in hexadecimal. It is remembered in cacheDir, which
// need not be there, by path, size and times; "" remembers nothing.
func SHA256(ctx context.Context, path, cacheDir string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if !st.Mode().IsRegular() {
		return "", fmt.Errorf("hash %s: it is no regular file", path)
	}
	entry := ""
	if cacheDir != "" {
		name, err := entryName(path, st)
		if err != nil {
			return "", err
		}
		entry = filepath.Join(cacheDir, name)
		if b, err := os.ReadFile(entry); err == nil {
			if sum := strings.TrimSpace(string(b)); len(sum) == 2*sha256.Size {
				return sum, nil
			}
		}
	}
	sum, err := hash(ctx, path)
	if err != nil {
		return "", fmt.Errorf("hash %s: %w", path, err)
	}
	if after, err := os.Stat(path); err != nil || after.Size() != st.Size() || !after.ModTime().Equal(st.ModTime()) || changed(after) != changed(st) {
		entry = "" // it was changed meanwhile: the hash may be of neither
	}
	if entry != "" {
		// A cache that cannot be written costs time, not correctness.
		_ = writeAtomic(entry, sum+"\n")
	}
	return sum, nil
}

// entryName is the name of a hash in the cache: of what a changed file would change.
func entryName(path string, st fs.FileInfo) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		abs = real
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d:%s %d %d %s", len(abs), abs, st.Size(), st.ModTime().UnixNano(), changed(st))
	return hex.EncodeToString(h.Sum(nil)[:16]) + ".sha256", nil
}

func hash(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, reader{ctx, f}); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// reader ends with a context.
type reader struct {
	ctx context.Context
	r   io.Reader
}

func (r reader) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(b)
}

// ErrEmpty says that a folder has no file that counts.
var ErrEmpty = errors.New("no files")

// Folder returns one SHA-256 for what is in a model's folder and those below it: the names
// and the hashes of all files, through links, but for hidden ones and text for people
// (*.md, *.txt and those without an extension). Its path and times do not count, so that
// copies are equal.
func Folder(ctx context.Context, dir, cacheDir string) (string, error) {
	var names []string
	err := walk(dir, "", &names, 0)
	if err != nil {
		return "", fmt.Errorf("hash folder %s: %w", dir, err)
	}
	if len(names) == 0 {
		return "", fmt.Errorf("hash folder %s: %w", dir, ErrEmpty)
	}
	slices.Sort(names)
	h := sha256.New()
	for _, name := range names {
		sum, err := SHA256(ctx, filepath.Join(dir, filepath.FromSlash(name)), cacheDir)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%d:%s %s\n", len(name), name, sum)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// mostDepth ends folders that link to themselves.
const mostDepth = 8

// walk collects the files that count, relative to dir, with slashes.
func walk(dir, below string, names *[]string, depth int) error {
	if depth > mostDepth {
		return errors.New("folders are nested too deeply")
	}
	list, err := os.ReadDir(filepath.Join(dir, filepath.FromSlash(below)))
	if err != nil {
		return err
	}
	for _, d := range list {
		if strings.HasPrefix(d.Name(), ".") {
			continue
		}
		name := d.Name()
		if below != "" {
			name = below + "/" + name
		}
		st, err := os.Stat(filepath.Join(dir, filepath.FromSlash(name)))
		switch {
		case err != nil:
			return err
		case st.IsDir():
			if err := walk(dir, name, names, depth+1); err != nil {
				return err
			}
		case !forPeople(d.Name()):
			*names = append(*names, name)
		}
	}
	return nil
}

// forPeople says whether a file is text that no engine reads.
func forPeople(name string) bool {
	switch strings.ToLower(filepath.Ext(name)) {
	case "", ".md", ".txt", ".pdf", ".png", ".jpg":
		return true
	}
	return false
}

// writeAtomic writes a file that is never seen in part.
func writeAtomic(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
