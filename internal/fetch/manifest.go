package fetch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
)

// manifestName is the file in an asset's folder that lists what is in it.
const manifestName = "manifest.json"

// manifest describes an unpacked asset, so that a later run sees without reading
// the content that it is whole.
type manifest struct {
	Name    string     `json:"name"`
	Version string     `json:"version"`
	Files   []fileInfo `json:"files"`
}

// fileInfo is one file or link of an asset.
type fileInfo struct {
	Name string `json:"name"`
	// Link is the target when it is a symbolic link; nothing else is set then.
	Link string `json:"link,omitempty"`
	Size int64  `json:"size,omitempty"`
	// MTime is in nanoseconds since 1970.
	MTime  int64  `json:"mtime,omitempty"`
	SHA256 string `json:"sha256,omitempty"`
}

// writeManifest describes dir as it is. It is written last, by rename.
func writeManifest(dir string, a asset) error {
	m := manifest{Name: a.name, Version: a.version}
	// An asset is one flat folder: members are unpacked by their base names.
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == manifestName {
			continue
		}
		f, err := stat(dir, e.Name())
		if err != nil {
			return err
		}
		if f.Link == "" {
			if f.SHA256, err = hashFile(context.Background(), filepath.Join(dir, f.Name)); err != nil {
				return err
			}
		}
		m.Files = append(m.Files, f)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(m); err != nil {
		return err
	}
	// By rename, so that a reader in another process never sees half of it.
	tmp := filepath.Join(dir, "."+manifestName)
	if err := os.WriteFile(tmp, b.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, manifestName))
}

// stat describes one file without its hash.
func stat(dir, name string) (fileInfo, error) {
	// Not followed: a link is described as a link, and one that was replaced by a
	// file is a difference.
	info, err := os.Lstat(filepath.Join(dir, name))
	if err != nil {
		return fileInfo{}, err
	}
	if info.Mode()&os.ModeSymlink != 0 {
		target, err := os.Readlink(filepath.Join(dir, name))
		return fileInfo{Name: name, Link: target}, err
	}
	return fileInfo{Name: name, Size: info.Size(), MTime: info.ModTime().UnixNano()}, nil
}

// readManifest reads the manifest and checks that it covers the asset's pins.
func readManifest(dir string, a asset) (manifest, error) {
	var m manifest
	b, err := os.ReadFile(filepath.Join(dir, manifestName))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("read %s: %w", filepath.Join(dir, manifestName), err)
	}
	// The manifest is only trusted as far as the pins go: an edited one, or one of
	// an older table, does not make a folder whole.
	listed := map[string]fileInfo{}
	for _, f := range m.Files {
		if f.Name != filepath.Base(f.Name) {
			return m, fmt.Errorf("%s: file name %q", filepath.Join(dir, manifestName), f.Name)
		}
		listed[f.Name] = f
	}
	for _, pin := range a.files {
		if got := listed[pin.name]; got.SHA256 != pin.sha256 {
			return m, &HashError{File: filepath.Join(dir, pin.name), Want: pin.sha256, Got: got.SHA256}
		}
	}
	for name, target := range a.links {
		if listed[name].Link != target {
			return m, fmt.Errorf("%s: no link %s", dir, name)
		}
	}
	return m, nil
}

// complete says, from sizes and times alone, whether dir holds the asset. It
// takes microseconds.
func complete(dir string, a asset) bool {
	m, err := readManifest(dir, a)
	if err != nil {
		return false
	}
	for _, want := range m.Files {
		got, err := stat(dir, want.Name)
		got.SHA256 = want.SHA256
		if err != nil || got != want {
			return false
		}
	}
	return true
}

// verify reads every file of an asset and compares it with the manifest and the
// pins.
func verify(ctx context.Context, dir string, a asset) error {
	m, err := readManifest(dir, a)
	if err != nil {
		return err
	}
	for _, want := range m.Files {
		path := filepath.Join(dir, want.Name)
		if want.Link != "" {
			got, err := os.Readlink(path)
			if err != nil {
				return err
			}
			if got != want.Link {
				return fmt.Errorf("%s: want a link to %s, got %q", path, want.Link, got)
			}
			continue
		}
		if err := check(ctx, path, path, want.Size, want.SHA256); err != nil {
			return err
		}
	}
	return nil
}

// check compares a file with its pin; name is what the error calls it.
func check(ctx context.Context, path, name string, size int64, sum string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	// The size first: it saves reading 250 MB to see that a file is cut.
	if info.Size() != size {
		return &HashError{File: name, Want: strconv.FormatInt(size, 10) + " bytes", Got: strconv.FormatInt(info.Size(), 10) + " bytes"}
	}
	got, err := hashFile(ctx, path)
	if err != nil {
		return err
	}
	if got != sum {
		return &HashError{File: name, Want: sum, Got: got}
	}
	return nil
}

// hashFile returns a file's SHA-256 in hex.
func hashFile(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, &ctxReader{ctx, f}); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
