package archtest

import (
	"fmt"
	"go/ast"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// declares says whether a file declares a package-level variable.
func declares(f *File, variable string) bool {
	for _, decl := range f.AST.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range gen.Specs {
			vs, ok := spec.(*ast.ValueSpec)
			if ok && vs.Names[0].Name == variable {
				return true
			}
		}
	}
	return false
}

// TestRules shows each rule code that breaks it and code that does not.
func TestRules(t *testing.T) {
	own := func(clause string) string { return "import " + strings.ReplaceAll(clause, "MOD", Module) + "\n" }
	params := func(list string) string { return "func f(" + list + ") {}" }
	lines := func(n int) string { return strings.Repeat("\n", n) }
	tests := map[string]struct {
		path, src string
		check     func(*File) []Finding
		want      string // in the finding; empty for none
	}{
		"sideways":          {"xds/a.go", own(`"MOD/relay"`), CheckArrows, "xds/a.go:2: xds may not import relay: parts talk"},
		"up":                {"internal/x/a.go", own(`"MOD/envoy"`), CheckArrows, "internal may not import envoy"},
		"down":              {"relay/a.go", own(`"MOD/internal/openai"`), CheckArrows, ""},
		"own sub-package":   {"worker/sim/a.go", own(`"MOD/worker"`), CheckArrows, ""},
		"shared picker":     {"relay/a.go", own(`"MOD/extproc/picker"`), CheckArrows, ""},
		"only the picker":   {"relay/a.go", own(`"MOD/extproc"`), CheckArrows, "relay may not import extproc"},
		"picker stays low":  {"extproc/picker/a.go", own(`"MOD/extproc"`), CheckArrows, "extproc/picker may not import"},
		"cmd sees all":      {"cmd/kvmesh/a.go", own(`"MOD/relay"`), CheckArrows, ""},
		"prefix is no path": {"workers/a.go", "", CheckArrows, "no rule in archtest.Arrows"},

		"env":             {"relay/a.go", `import "os"; func f() { os.Getenv("X") }`, CheckHabits, "os.Getenv outside cmd/"},
		"env in tests":    {"relay/a_test.go", `import "os"; func f() { os.Getenv("X") }`, CheckHabits, ""},
		"env in cmd":      {"cmd/kvmesh/a.go", `import "os"; func f() { os.Getenv("X") }`, CheckHabits, ""},
		"alias":           {"relay/a.go", own(`oai "MOD/internal/openai"`), CheckHabits, "import alias oai for our own internal/openai"},
		"blank import":    {"cmd/kvmesh/a.go", own(`_ "MOD/cmd/kvmesh/libffi"`), CheckHabits, ""},
		"global":          {"relay/a.go", "var cache = map[string]int{}", CheckHabits, "package-level var cache"},
		"sentinel":        {"relay/a.go", "var ErrGone, errBusy error", CheckHabits, ""},
		"assertion":       {"relay/a.go", "var _ error = e{}", CheckHabits, ""},
		"embedded":        {"relay/a.go", "import _ \"embed\"\n//go:embed x\nvar page string", CheckHabits, ""},
		"excused":         {"worker/llamacpp/a.go", "var theLibrary int", CheckHabits, ""},
		"global in tests": {"relay/a_test.go", "var update bool", CheckHabits, ""},

		"sleep":           {"relay/a_test.go", `import "time"; func TestX() { time.Sleep(1) }`, CheckHabits, "time.Sleep"},
		"sleep in bubble": {"relay/a_test.go", `import "time"; func TestX() { synctest.Test(t, func() { time.Sleep(1) }) }`, CheckHabits, ""},
		"bubble's helper": {"relay/a_test.go", "import \"time\"\n// settle waits inside a bubble.\nfunc settle() { time.Sleep(1) }", CheckHabits, ""},
		"sleep in e2e":    {"test/e2e/a_test.go", `import "time"; func TestX() { time.Sleep(1) }`, CheckHabits, ""},

		"no comment":         {"relay/a.go", "func F() {}", CheckDocs, "exported F has no comment"},
		"no comment, method": {"relay/a.go", "// T is.\ntype T struct{}\nfunc (t *T) M() {}", CheckDocs, "exported M"},
		"hidden type":        {"relay/a.go", "type t struct{}\nfunc (t *t) M() {}", CheckDocs, ""},
		"no comment, const":  {"relay/a.go", "const (\n\tA = 1 // one\n\tB = 2\n)", CheckDocs, "relay/a.go:4: exported B"},
		"group comment":      {"relay/a.go", "// Numbers.\nconst (\n\tA = 1\n\tB = 2\n)", CheckDocs, ""},

		"long file":        {"relay/a.go", lines(500), CheckBudgets, "501 lines, at most 500"},
		"file just fits":   {"relay/a.go", lines(499), CheckBudgets, ""},
		"long function":    {"relay/a.go", "func f() {" + lines(80) + "}", CheckBudgets, "function f has 81 lines"},
		"long test":        {"relay/a_test.go", "func f() {" + lines(80) + "}", CheckBudgets, ""},
		"six parameters":   {"relay/a.go", params("a, b, c int, d, e, f string"), CheckBudgets, "6 parameters"},
		"context and five": {"relay/a.go", params("ctx context.Context, a, b, c, d, e int"), CheckBudgets, ""},
		"six methods":      {"relay/a.go", "type i interface { a(); b(); c(); d(); e(); f() }", CheckBudgets, "interface i has 6 methods"},
		"nine imports":     {"cmd/a.go", imports(9), CheckBudgets, "imports 9 of our own"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f, err := Parse(tt.path, []byte("package p\n"+tt.src))
			if err != nil {
				t.Fatal(err)
			}
			found := tt.check(f)
			if (len(found) > 0) != (tt.want != "") || len(found) > 0 && !strings.Contains(found[0].String(), tt.want) {
				t.Errorf("found %v, want %q", found, tt.want)
			}
		})
	}
}

// imports writes n imports of our own.
func imports(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "import %q\n", fmt.Sprintf("%s/internal/p%d", Module, i))
	}
	return b.String()
}

func TestCheckPackages(t *testing.T) {
	parse := func(path, src string) *File {
		f, err := Parse(path, []byte(src))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	good := []*File{parse("a/x.go", "package a"), parse("a/doc.go", "// Package a is.\npackage a"), parse("b/b_test.go", "package b")}
	if found := CheckPackages(good); len(found) != 0 {
		t.Errorf("found %v", found)
	}
	bad := append(good, parse("c/x.go", "package c"))
	if found := CheckPackages(bad); len(found) != 1 || found[0].Path != "c/x.go" {
		t.Errorf("found %v", found)
	}
}

func TestCheckTotals(t *testing.T) {
	good := Totals{Code: 1000, Tests: 1200, Comments: 250, Files: []int{100, 200}, Funcs: []int{5, 10, 20}}
	if found := CheckTotals(good); len(found) != 0 {
		t.Errorf("found %v", found)
	}
	tests := map[string]func(*Totals){
		"files of ten":     func(t *Totals) { t.Files = []int{100, 351} },
		"functions of ten": func(t *Totals) { t.Funcs = []int{5, 36} },
		"over 60 lines":    func(t *Totals) { t.Funcs = append(make([]int, 40), 61) },
		"are comments":     func(t *Totals) { t.Comments = 150 },
		"lines of tests":   func(t *Totals) { t.Tests = 740 },
	}
	for want, change := range tests {
		bad := good
		change(&bad)
		if found := CheckTotals(bad); len(found) != 1 || !strings.Contains(found[0].Rule, want) {
			t.Errorf("%s: found %v", want, found)
		}
	}
	bad := good
	bad.Comments = 360
	if len(CheckTotals(bad)) != 1 {
		t.Error("too many comments pass")
	}
}

func TestSumCountsCommentsOnce(t *testing.T) {
	f, err := Parse("a/a.go", []byte("// Package a is\n// two lines.\npackage a\n\nfunc f() { // behind\n\t/* inside */ g()\n}\n"))
	if err != nil {
		t.Fatal(err)
	}
	sum := Sum([]*File{f})
	if sum.Comments != 4 || sum.Funcs[0] != 3 || sum.Tests != 0 {
		t.Errorf("sum: %+v", sum)
	}
}

func TestPackagesForTestsAreTests(t *testing.T) {
	var files []*File
	for _, name := range []string{"a/a.go", "a/a_test.go", "worker/enginetest/x.go", "test/e2e/x.go", "latesting/x.go"} {
		f, err := Parse(name, []byte("package p\n"))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if sum := Sum(files); sum.Tests != 3*files[0].Lines || sum.Code != 2*files[0].Lines {
		t.Errorf("sum: %+v", sum)
	}
}

func TestScriptLines(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.txtar": "1\n2\n", "b.txt": "1\n", "c.txtar": "1\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := ScriptLines(dir); n != 3 || err != nil {
		t.Errorf("%d lines, %v", n, err)
	}
}
