package modelstore

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Bounds of a manifest.
const (
	maxManifest = 4 << 20 // bytes
	maxFiles    = 10000
	maxSize     = 64 << 40 // bytes of one file
)

// manifestName is the file in a model's folder that says what else is in it.
const manifestName = "manifest.json"

// Manifest says what a version of a model consists of. It is written as JSON or
// YAML. A version never changes: other files are another version.
type Manifest struct {
	Name    string `json:"name" yaml:"name"`
	Version string `json:"version" yaml:"version"`
	// Engine is the one that runs it, empty for whichever the worker has.
	Engine string `json:"engine,omitempty" yaml:"engine"`
	// Main is the path of the file that the engine opens, default the first.
	Main   string `json:"main,omitempty" yaml:"main"`
	Config Config `json:"config,omitzero" yaml:"config"`
	Files  []File `json:"files" yaml:"files"`
}

// Config are an engine's settings that belong to a model. Zero leaves a setting to
// the worker, whose own flags win over all of them.
type Config struct {
	ContextLength int `json:"contextLength,omitempty" yaml:"contextLength"` // tokens
	MaxNumSeqs    int `json:"maxNumSeqs,omitempty" yaml:"maxNumSeqs"`
	KVTokens      int `json:"kvTokens,omitempty" yaml:"kvTokens"`
	Threads       int `json:"threads,omitempty" yaml:"threads"`
}

// File is one file of a model.
type File struct {
	Path   string `json:"path" yaml:"path"`     // in the model's folder, with slashes
	Size   int64  `json:"size" yaml:"size"`     // bytes
	SHA256 string `json:"sha256" yaml:"sha256"` // 64 hexadecimal digits
	// URL is where it is, relative to the manifest or absolute; default Path.
	URL string `json:"url,omitempty" yaml:"url"`
}

// Ref names one version of a model.
type Ref struct{ Name, Version string }

// ParseRef reads NAME@VERSION.
func ParseRef(s string) (Ref, error) {
	name, version, ok := strings.Cut(s, "@")
	r := Ref{name, version}
	if !ok {
		return r, fmt.Errorf("%q: want NAME@VERSION", s)
	}
	return r, r.validate()
}

// String writes NAME@VERSION.
func (r Ref) String() string { return r.Name + "@" + r.Version }

// validate holds both parts to names that are folders on every system.
func (r Ref) validate() error {
	part := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}$`)
	for what, s := range map[string]string{"name": r.Name, "version": r.Version} {
		if !part.MatchString(s) {
			return fmt.Errorf("%s %q: want letters, digits, '.', '_', '+' and '-', at most 128", what, s)
		}
	}
	return nil
}

// Ref names the manifest's version.
func (m Manifest) Ref() Ref { return Ref{m.Name, m.Version} }

// Bytes is the size of all files.
func (m Manifest) Bytes() (n int64) {
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

// ParseManifest reads and checks a manifest in JSON or YAML. A field it does not know
// is an error.
func ParseManifest(raw []byte) (Manifest, error) {
	var m Manifest
	if len(raw) > maxManifest {
		return m, fmt.Errorf("manifest of %d bytes, at most %d are read", len(raw), maxManifest)
	}
	d := yaml.NewDecoder(bytes.NewReader(raw)) // JSON is YAML
	d.KnownFields(true)
	if err := d.Decode(&m); err != nil {
		return m, fmt.Errorf("manifest: %w", err)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return m, errors.New("manifest: there is something behind it")
	}
	if len(m.Files) > 0 && m.Main == "" {
		m.Main = m.Files[0].Path
	}
	for i := range m.Files {
		m.Files[i].SHA256 = strings.ToLower(m.Files[i].SHA256)
	}
	return m, m.validate()
}

// validate reports the first thing that is wrong.
func (m Manifest) validate() error {
	if err := m.Ref().validate(); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	if len(m.Files) == 0 || len(m.Files) > maxFiles {
		return fmt.Errorf("manifest of %s: %d files, want 1 to %d", m.Ref(), len(m.Files), maxFiles)
	}
	c := m.Config
	if c.ContextLength < 0 || c.MaxNumSeqs < 0 || c.KVTokens < 0 || c.Threads < 0 {
		return fmt.Errorf("manifest of %s: config has a negative number", m.Ref())
	}
	seen := map[string]bool{}
	for _, f := range m.Files {
		if err := f.validate(); err != nil {
			return fmt.Errorf("manifest of %s: %w", m.Ref(), err)
		}
		// Some systems do not tell names by case.
		key := strings.ToLower(f.Path)
		if seen[key] {
			return fmt.Errorf("manifest of %s: file %q is there twice", m.Ref(), f.Path)
		}
		seen[key] = true
	}
	for _, f := range m.Files {
		for dir := path.Dir(strings.ToLower(f.Path)); dir != "."; dir = path.Dir(dir) {
			if seen[dir] {
				return fmt.Errorf("manifest of %s: %q is a file and a folder", m.Ref(), dir)
			}
		}
	}
	if !seen[strings.ToLower(m.Main)] {
		return fmt.Errorf("manifest of %s: main %q is none of the files", m.Ref(), m.Main)
	}
	return nil
}

// validate keeps a file inside its folder.
func (f File) validate() error {
	clean := path.Clean(f.Path)
	if clean != f.Path || clean == "." || strings.ContainsAny(f.Path, "\\:\x00") || !filepath.IsLocal(filepath.FromSlash(f.Path)) {
		return fmt.Errorf("path %q: want one inside the model's folder", f.Path)
	}
	if strings.EqualFold(f.Path, manifestName) || strings.HasSuffix(f.Path, partSuffix) {
		return fmt.Errorf("path %q: the store uses that name", f.Path)
	}
	if f.Size < 0 || f.Size > maxSize {
		return fmt.Errorf("size %d of %s: want 0 to %d", f.Size, f.Path, int64(maxSize))
	}
	if b, err := hex.DecodeString(f.SHA256); err != nil || len(b) != 32 {
		return fmt.Errorf("sha256 %q of %s: want 64 hexadecimal digits", f.SHA256, f.Path)
	}
	return nil
}
