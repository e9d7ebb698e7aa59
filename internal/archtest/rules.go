package archtest

import (
	"go/ast"
	"go/token"
	"strings"
)

// globals are the package-level variables that are allowed although they can
// change, with the reason.
func globals() map[string]string {
	return map[string]string{
		"worker.callHead":            "a regular expression is compiled once and never changes",
		"worker/llamacpp.theLibrary": "a C library is loaded once into one set of function addresses per process",
	}
}

// CheckHabits finds the small things that the module does without: reads of the
// environment outside cmd, package-level variables, aliases of our own packages,
// and sleeping tests.
func CheckHabits(f *File) []Finding {
	found := append(checkEnv(f), checkAliases(f)...)
	if f.Test {
		return append(found, checkSleep(f)...)
	}
	return append(found, checkGlobals(f)...)
}

// checkEnv: configuration is passed in, so that two instances can differ. A test
// that starts itself again as another process has no other way to say so.
func checkEnv(f *File) (found []Finding) {
	if f.Test || inside(f.Dir, "cmd") || inside(f.Dir, "test") {
		return nil
	}
	ast.Inspect(f.AST, func(n ast.Node) bool {
		for _, name := range []string{"Getenv", "LookupEnv", "Environ", "ExpandEnv"} {
			if selects(n, "os", name) {
				found = append(found, f.at(n.Pos(), "os.%s outside cmd/: take the value as configuration", name))
			}
		}
		return true
	})
	return found
}

// checkAliases: one name per package everywhere. A blank import is none.
func checkAliases(f *File) (found []Finding) {
	for spec, to := range f.ours() {
		if spec.Name != nil && spec.Name.Name != "_" {
			found = append(found, f.at(spec.Pos(), "import alias %s for our own %s", spec.Name.Name, to))
		}
	}
	return found
}

// checkGlobals: state belongs to values. Errors, embedded files and assertions
// that a type has an interface are no state.
func checkGlobals(f *File) (found []Finding) {
	for _, decl := range f.AST.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok || gen.Tok != token.VAR || embeds(gen) {
			continue
		}
		for _, spec := range gen.Specs {
			for _, name := range spec.(*ast.ValueSpec).Names {
				n := name.Name
				if n == "_" || strings.HasPrefix(n, "Err") || strings.HasPrefix(n, "err") || globals()[f.Dir+"."+n] != "" {
					continue
				}
				found = append(found, f.at(name.Pos(), "package-level var %s: make it a constant, a function or a field", n))
			}
		}
	}
	return found
}

// embeds says whether a declaration is filled by go:embed.
func embeds(gen *ast.GenDecl) bool {
	if gen.Doc == nil {
		return false
	}
	for _, c := range gen.Doc.List {
		if strings.HasPrefix(c.Text, "//go:embed ") {
			return true
		}
	}
	return false
}

// checkSleep: a test that sleeps is slow when the time is long and flaky when it
// is short. Inside a synctest bubble time is fake; a helper for bubbles says so
// in its comment.
func checkSleep(f *File) (found []Finding) {
	if inside(f.Dir, "test") {
		return nil
	}
	for _, decl := range f.AST.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || strings.Contains(fn.Doc.Text(), "bubble") || strings.Contains(fn.Doc.Text(), "synctest") {
			continue
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && selects(call.Fun, "synctest", "Test") {
				return false
			}
			if selects(n, "time", "Sleep") {
				found = append(found, f.at(n.Pos(), "time.Sleep in a test outside a synctest bubble"))
			}
			return true
		})
	}
	return found
}

// selects says whether a node is pkg.name.
func selects(n ast.Node, pkg, name string) bool {
	sel, ok := n.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == pkg
}

// CheckDocs finds exported names without a comment in one file, and
// CheckPackages packages without one.
func CheckDocs(f *File) (found []Finding) {
	if f.Test {
		return nil
	}
	for _, decl := range f.AST.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && d.Doc == nil && receiverExported(d) {
				found = append(found, f.at(d.Name.Pos(), "exported %s has no comment", d.Name.Name))
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				found = append(found, undocumented(f, d, spec)...)
			}
		}
	}
	return found
}

// receiverExported says whether a function, or the type it is a method of, is
// seen outside.
func receiverExported(d *ast.FuncDecl) bool {
	if d.Recv == nil || len(d.Recv.List) == 0 {
		return true
	}
	// A receiver may be a pointer, and its type may have parameters.
	typ := d.Recv.List[0].Type
	for {
		switch t := typ.(type) {
		case *ast.StarExpr:
			typ = t.X
		case *ast.IndexExpr:
			typ = t.X
		case *ast.IndexListExpr:
			typ = t.X
		case *ast.Ident:
			return t.IsExported()
		default:
			return true
		}
	}
}

// undocumented finds exported names in one line of a declaration. A comment on
// the group, above the line or behind it counts.
func undocumented(f *File, d *ast.GenDecl, spec ast.Spec) (found []Finding) {
	check := func(name *ast.Ident, doc, line *ast.CommentGroup) {
		if name.IsExported() && d.Doc == nil && doc == nil && line == nil {
			found = append(found, f.at(name.Pos(), "exported %s has no comment", name.Name))
		}
	}
	switch s := spec.(type) {
	case *ast.TypeSpec:
		check(s.Name, s.Doc, s.Comment)
	case *ast.ValueSpec:
		for _, name := range s.Names {
			check(name, s.Doc, s.Comment)
		}
	}
	return found
}

// CheckPackages finds packages that no file describes.
func CheckPackages(files []*File) (found []Finding) {
	documented, first := map[string]bool{}, map[string]*File{}
	for _, f := range files {
		if f.Test {
			continue
		}
		if f.AST.Doc != nil {
			documented[f.Dir] = true
		}
		if first[f.Dir] == nil {
			first[f.Dir] = f
		}
	}
	for dir, f := range first {
		if !documented[dir] {
			found = append(found, Finding{f.Path, 0, "package " + f.AST.Name.Name + " has no package comment"})
		}
	}
	return found
}
