package archtest

import (
	"bytes"
	"fmt"
	"go/ast"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The budgets of one file and of what is in it.
const (
	maxFile      = 500 // lines
	maxFunc      = 80  // lines
	maxParams    = 5   // after the context
	maxInterface = 5   // methods
	maxImports   = 8   // of our own packages
)

// Budgets over the whole module, of files that are no tests.
const (
	p90File  = 350 // lines
	p90Func  = 35  // lines
	longFunc = 60  // lines
	maxLong  = 2.0 // per cent of the functions that may be longer
)

// Shares over the whole module: comment lines of all lines in per cent, and
// lines of tests per line of code. The lower bounds are a ratchet: they are where
// the module stands, on the way to 20 and 1.0, and only ever go up (RATIONALE.md).
const (
	minComments, maxComments = 16.0, 35.0
	minTests, maxTests       = 0.75, 1.6
)

// CheckBudgets finds what is larger than a reader should have to bear. Tests may
// have long functions, for their tables, but no long files.
func CheckBudgets(f *File) (found []Finding) {
	// The whole file, comments included, because the reader scrolls past them too.
	if f.Lines > maxFile {
		found = append(found, Finding{f.Path, 0, fmt.Sprintf("%d lines, at most %d", f.Lines, maxFile)})
	}
	if n := len(f.ours()); n > maxImports {
		found = append(found, Finding{f.Path, 0, fmt.Sprintf("imports %d of our own packages, at most %d", n, maxImports)})
	}
	if f.Test {
		return found
	}
	ast.Inspect(f.AST, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if lines := f.span(n); lines > maxFunc {
				found = append(found, f.at(n.Pos(), "function %s has %d lines, at most %d", n.Name.Name, lines, maxFunc))
			}
			if params := parameters(n.Type); params > maxParams {
				found = append(found, f.at(n.Pos(), "function %s has %d parameters after the context, at most %d", n.Name.Name, params, maxParams))
			}
		case *ast.TypeSpec:
			if it, ok := n.Type.(*ast.InterfaceType); ok && it.Methods.NumFields() > maxInterface {
				found = append(found, f.at(n.Pos(), "interface %s has %d methods, at most %d", n.Name.Name, it.Methods.NumFields(), maxInterface))
			}
		}
		return true
	})
	return found
}

// parameters counts a function's parameters without a leading context.
func parameters(t *ast.FuncType) int {
	n := t.Params.NumFields()
	if n > 0 && selects(t.Params.List[0].Type, "context", "Context") {
		n--
	}
	return n
}

// Totals are the sums that the module-wide budgets are about.
type Totals struct {
	// Code, Tests and Comments are lines; comments are those of the code.
	Code, Tests, Comments int
	// Files and Funcs are the lengths of the code's files and functions.
	Files, Funcs []int
}

// Sum adds files up.
func Sum(files []*File) (t Totals) {
	for _, f := range files {
		if f.Test || forTests(f.Dir) {
			t.Tests += f.Lines
			continue
		}
		t.Code += f.Lines
		t.Files = append(t.Files, f.Lines)
		t.Comments += f.commentLines()
		for _, decl := range f.AST.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok {
				t.Funcs = append(t.Funcs, f.span(fn))
			}
		}
	}
	return t
}

// forTests says whether a package exists for tests only: those below test/, and
// those that are named so, like enginetest.
func forTests(dir string) bool { return inside(dir, "test") || strings.HasSuffix(dir, "test") }

// ScriptLines counts the lines of all txtar scripts below root, which are tests
// in another language.
func ScriptLines(root string) (n int, err error) {
	err = filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".txtar" {
			return err
		}
		text, err := os.ReadFile(name)
		n += bytes.Count(text, []byte("\n"))
		return err
	})
	return n, err
}

// commentLines counts the lines that have a comment on them.
func (f *File) commentLines() int {
	// A set, because two comments may share a line, and one may span several.
	lines := map[int]bool{}
	for _, group := range f.AST.Comments {
		for i := f.line(group.Pos()); i <= f.line(group.End()); i++ {
			lines[i] = true
		}
	}
	return len(lines)
}

// CheckTotals compares sums with the module-wide budgets.
func CheckTotals(t Totals) (found []Finding) {
	if t.Code == 0 || len(t.Funcs) == 0 {
		return nil
	}
	// These have no place of their own: the log of the test lists the packages.
	report := func(format string, args ...any) {
		found = append(found, Finding{"the module", 0, fmt.Sprintf(format, args...)})
	}
	if p := percentile(t.Files, 90); p > p90File {
		report("nine files of ten have up to %d lines, at most %d", p, p90File)
	}
	if p := percentile(t.Funcs, 90); p > p90Func {
		report("nine functions of ten have up to %d lines, at most %d", p, p90Func)
	}
	if s := t.LongShare(); s > maxLong {
		report("%.1f %% of the functions are over %d lines, at most %.0f %%", s, longFunc, maxLong)
	}
	if s := t.CommentShare(); s < minComments || s > maxComments {
		report("%.1f %% of the lines are comments, %.0f to %.0f %% wanted", s, minComments, maxComments)
	}
	if r := t.TestRatio(); r < minTests || r > maxTests {
		report("%.2f lines of tests per line of code, %.2f to %.1f wanted", r, minTests, maxTests)
	}
	return found
}

// CommentShare is the share of comment lines in the code, in per cent.
func (t Totals) CommentShare() float64 { return 100 * float64(t.Comments) / float64(t.Code) }

// TestRatio is lines of tests per line of code.
func (t Totals) TestRatio() float64 { return float64(t.Tests) / float64(t.Code) }

// LongShare is the share of functions over the length for long ones, in per cent.
func (t Totals) LongShare() float64 {
	long := 0
	for _, n := range t.Funcs {
		if n > longFunc {
			long++
		}
	}
	return 100 * float64(long) / float64(len(t.Funcs))
}

// String writes the totals for people.
func (t Totals) String() string {
	return fmt.Sprintf("%d lines of code (p90 file %d, p90 func %d, %.1f %% over %d), %.0f %% comments, %.2f tests/code",
		t.Code, percentile(t.Files, 90), percentile(t.Funcs, 90), t.LongShare(), longFunc, t.CommentShare(), t.TestRatio())
}

// percentile returns the value that p per cent of a list do not exceed.
func percentile(list []int, p int) int {
	// Nearest rank: a value that occurs, so that a finding can be looked up.
	sorted := slices.Sorted(slices.Values(list))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}
