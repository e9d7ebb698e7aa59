// Package archtest holds the module to its own rules: who may import whom, and
// the budgets of size and documentation. Its tests run over the whole tree with
// `go test ./...`; a finding names the file, the line and the rule.
//
// A rule that stands in the way of good code is changed here, with its reason, or
// gets an exception in the table of the rule.
package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Module is the import path of this module.
const Module = "github.com/kvmesh/kvmesh"

// Finding is one place that breaks a rule.
type Finding struct {
	// Path is relative to the module; Line is 0 for a whole file or package.
	Path string
	Line int
	Rule string
}

// String writes a finding as compilers do.
func (f Finding) String() string {
	if f.Line == 0 {
		return f.Path + ": " + f.Rule
	}
	return f.Path + ":" + strconv.Itoa(f.Line) + ": " + f.Rule
}

// File is one parsed source file that a person wrote.
type File struct {
	// Path and Dir are relative to the module's root, with slashes.
	Path, Dir string
	Test      bool
	AST       *ast.File
	// Lines counts all lines, comments included.
	Lines int

	fset *token.FileSet
}

// Parse reads one file's source.
func Parse(name string, src []byte) (*File, error) {
	f := &File{Path: name, Dir: path.Dir(name), Test: strings.HasSuffix(name, "_test.go"), fset: token.NewFileSet()}
	var err error
	// Objects are not resolved: no rule needs types, and parsing the whole module
	// then takes a tenth of a second.
	if f.AST, err = parser.ParseFile(f.fset, name, src, parser.ParseComments|parser.SkipObjectResolution); err != nil {
		return nil, fmt.Errorf("parse %s: %w", name, err)
	}
	f.Lines = f.fset.Position(f.AST.FileEnd).Line
	return f, nil
}

// Load parses every hand-written Go file below the module's root. Generated
// files, test data and folders that begin with a dot are left out.
func Load(root string) ([]*File, error) {
	var files []*File
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			base := d.Name()
			if name != root && (strings.HasPrefix(base, ".") || base == "testdata" || base == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		f, err := Parse(filepath.ToSlash(rel), src)
		if err != nil {
			return err
		}
		if !ast.IsGenerated(f.AST) {
			files = append(files, f)
		}
		return nil
	})
	return files, err
}

// line returns the line of a position.
func (f *File) line(p token.Pos) int { return f.fset.Position(p).Line }

// span returns how many lines a node takes.
func (f *File) span(n ast.Node) int { return f.line(n.End()) - f.line(n.Pos()) + 1 }

// at makes a finding in the file.
func (f *File) at(p token.Pos, format string, args ...any) Finding {
	return Finding{f.Path, f.line(p), fmt.Sprintf(format, args...)}
}

// ours returns the imports of this module's packages, relative to it.
func (f *File) ours() map[*ast.ImportSpec]string {
	m := map[*ast.ImportSpec]string{}
	for _, spec := range f.AST.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		if rel, ok := strings.CutPrefix(name, Module+"/"); ok {
			m[spec] = rel
		}
	}
	return m
}

// Arrow says what a folder may import of this module, and why no more.
type Arrow struct {
	// From is a folder; the longest one that holds a file counts.
	From string
	// To are the folders that it may import from, besides itself.
	To []string
	// Why is shown with a finding.
	Why string
}

// Arrows returns the import rules. Imports go down only.
func Arrows() []Arrow {
	// The reasons that several rules share.
	const (
		parts  = "parts talk over the wire, so each can be replaced or run alone"
		leaves = "everything may use a leaf, so it uses nothing above it"
	)
	return []Arrow{
		{"cmd", []string{""}, "the command wires everything together"},
		{"test", []string{""}, "end-to-end tests see the whole"},
		{"xds", []string{"envoy", "kvcache", "internal"}, parts},
		{"extproc", []string{"envoy", "kvcache", "internal"}, parts},
		{"relay", []string{"extproc/picker", "envoy", "kvcache", "internal"}, parts + "; only the choice of a worker is shared"},
		{"worker", []string{"envoy", "kvcache", "internal"}, parts},
		{"istio", []string{"envoy", "kvcache", "internal"}, parts},
		{"wasm", []string{"internal"}, "it runs inside Envoy and must stay small"},
		{"extproc/picker", []string{"internal"}, "relay shares it, so it must not pull ext_proc in"},
		{"envoy", []string{"internal"}, "constructors of configuration know no part of the mesh"},
		{"kvcache", []string{"internal"}, "the cache knows blocks, not who asks for them"},
		{"examples", nil, "policy files, embedded"},
		{"internal", nil, leaves},
	}
}

// CheckArrows finds imports that go up or sideways, and folders without a rule.
func CheckArrows(f *File) (found []Finding) {
	if f.Dir == "." {
		return nil // the root holds documentation only
	}
	arrow, ok := arrowOf(f.Dir)
	if !ok {
		return []Finding{{f.Path, 0, "this folder has no rule in archtest.Arrows: say what it may import, and why"}}
	}
	for spec, to := range f.ours() {
		// A folder is one part: its packages may import each other both ways, as far
		// as Go allows.
		allowed := inside(to, arrow.From) || slices.ContainsFunc(arrow.To, func(dir string) bool { return inside(to, dir) })
		if !allowed {
			found = append(found, f.at(spec.Pos(), "%s may not import %s: %s", arrow.From, to, arrow.Why))
		}
	}
	return found
}

// arrowOf returns the rule of the longest folder that holds dir.
func arrowOf(dir string) (best Arrow, ok bool) {
	for _, a := range Arrows() {
		if inside(dir, a.From) && len(a.From) > len(best.From) {
			best, ok = a, true
		}
	}
	return best, ok
}

// inside says whether dir is folder or below it; the empty folder is the root.
func inside(dir, folder string) bool {
	return folder == "" || dir == folder || strings.HasPrefix(dir, folder+"/")
}
