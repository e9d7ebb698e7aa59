package archtest

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// load parses the module once per test; it takes well under a second.
func load(t *testing.T) []*File {
	t.Helper()
	files, err := Load(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("only %d files: the module's root was not found", len(files))
	}
	return files
}

// report fails a test with every finding, in a stable order.
func report(t *testing.T, found []Finding) {
	t.Helper()
	slices.SortFunc(found, func(a, b Finding) int { return strings.Compare(a.String(), b.String()) })
	for _, f := range found {
		t.Error(f)
	}
}

func TestTheModule(t *testing.T) {
	files := load(t)
	for name, check := range map[string]func(*File) []Finding{
		"imports go down": CheckArrows,
		"habits":          CheckHabits,
		"names have docs": CheckDocs,
		"budgets":         CheckBudgets,
	} {
		t.Run(name, func(t *testing.T) {
			for _, f := range files {
				report(t, check(f))
			}
		})
	}
	t.Run("packages have docs", func(t *testing.T) { report(t, CheckPackages(files)) })
	t.Run("totals", func(t *testing.T) {
		all := Sum(files)
		scripts, err := ScriptLines(filepath.Join("..", ".."))
		if err != nil {
			t.Fatal(err)
		}
		all.Tests += scripts
		report(t, CheckTotals(all))
		byDir := map[string][]*File{}
		for _, f := range files {
			byDir[f.Dir] = append(byDir[f.Dir], f)
		}
		for _, dir := range slices.Sorted(maps.Keys(byDir)) {
			if sum := Sum(byDir[dir]); len(sum.Funcs) > 0 {
				t.Logf("%-28s %s", dir, sum)
			}
		}
		t.Logf("%-28s %s", "all", all)
	})
}

// TestExceptionsAreUsed keeps the tables from outliving what they excuse.
func TestExceptionsAreUsed(t *testing.T) {
	have := map[string]bool{}
	for _, f := range load(t) {
		for name := range globals() {
			dir, variable, _ := strings.Cut(name, ".")
			if f.Dir == dir && declares(f, variable) {
				have[name] = true
			}
		}
	}
	for name, why := range globals() {
		if !have[name] {
			t.Errorf("no var %s: remove its exception (%s)", name, why)
		}
	}
}
