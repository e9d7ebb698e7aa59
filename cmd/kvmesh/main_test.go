package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kvmesh": main})
}

// TestScripts runs the command as a user does. Scripts that need Envoy or a
// network are in test/e2e.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:  filepath.Join("testdata", "script"),
		Cmds: kvScripts(),
		Condition: func(name string) (bool, error) {
			if name != "root" {
				return false, fmt.Errorf("unknown condition %q", name)
			}
			return os.Geteuid() == 0, nil // nothing is read-only for root
		},
		Setup: func(ts *testscript.Env) error {
			ts.Setenv("XDG_CACHE_HOME", filepath.Join(ts.WorkDir, "cache"))
			ts.Setenv("TMPDIR", os.TempDir())
			// A PATH with this command and nothing else; testscript puts it first.
			ts.Setenv("ALONE", filepath.SplitList(os.Getenv("PATH"))[0])
			return nil
		},
	})
}

// command runs one command line in this process and returns its exit code and
// what it printed.
func command(t *testing.T, ctx context.Context, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errOut, getenv: func(string) string { return "" }}
	code = run(ctx, e, args)
	return code, out.String(), errOut.String()
}

func TestExitCodes(t *testing.T) {
	for name, tt := range map[string]struct {
		args   []string
		code   int
		stderr string
	}{
		"fine":              {[]string{"version"}, 0, ""},
		"unknown command":   {[]string{"nosuch"}, 2, `unknown command "nosuch"`},
		"unknown flag":      {[]string{"version", "--nosuch"}, 2, "unknown flag"},
		"surplus argument":  {[]string{"version", "x"}, 2, `unknown command "x"`},
		"wrong argument":    {[]string{"fetch", "envoyy"}, 2, "envoyy"},
		"wrong output":      {[]string{"version", "-o", "xml"}, 2, "want text or json"},
		"wrong log level":   {[]string{"version", "--log-level", "loud"}, 2, "--log-level"},
		"wrong log format":  {[]string{"version", "--log-format", "xml"}, 2, "--log-format"},
		"failing, not used": {[]string{"fetch", "--verify", "redis"}, 1, "hint: run `kvmesh fetch`"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("XDG_CACHE_HOME", "")
			t.Setenv("HOME", t.TempDir())
			t.Setenv("PATH", "")
			code, _, stderr := command(t, t.Context(), tt.args...)
			if code != tt.code || !strings.Contains(stderr, tt.stderr) || (code == 0) != (stderr == "") {
				t.Errorf("exit %d, stderr %q; want %d, %q", code, stderr, tt.code, tt.stderr)
			}
		})
	}
}

func TestInterruptIsNamed(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", "")
	code, _, stderr := command(t, ctx, "fetch", "model")
	if code != exitFailure || !strings.HasSuffix(stderr, "kvmesh: interrupted\n") {
		t.Errorf("exit %d, stderr %q", code, stderr)
	}
}

// How it was called is how it is called next.
func TestSelf(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, want := range map[string]string{"bin/kvmesh": "bin/kvmesh", "kvmesh": "kvmesh", "": "kvmesh"} {
		var out bytes.Buffer
		e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &out, getenv: func(string) string { return "" }, name: name}
		if code := run(t.Context(), e, []string{"init", "--engine", "sim", strings.ReplaceAll(name, "/", "-") + ".yaml"}); code != 0 {
			t.Errorf("exit %d", code)
		}
		if !strings.Contains(out.String(), "; next: "+want+" up -f ") {
			t.Errorf("called as %q: %s", name, out.String())
		}
	}
}

func TestHintsGoThroughWrapping(t *testing.T) {
	cause := errors.New("cause")
	err := fmt.Errorf("outer: %w", withHint(fmt.Errorf("inner: %w", cause), "do this"))
	var b bytes.Buffer
	printError(&b, err)
	if want := "kvmesh: outer: inner: cause\nhint: do this\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
	if !errors.Is(err, cause) || !errors.Is(usagef("x: %w", cause), cause) {
		t.Error("the cause is hidden")
	}
}

// TestEveryCommandExplainsItself walks the tree: each command has a line, an
// example that calls it, and each flag a description.
func TestEveryCommandExplainsItself(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			// pflag takes what stands in back-quotes for the name of the value.
			if f.Usage == "" || strings.Contains(f.Usage, "`") {
				t.Errorf("%s --%s: usage %q: empty, or with a back-quote", c.CommandPath(), f.Name, f.Usage)
			}
		})
		if c.Short == "" || !strings.Contains(c.Example, "kvmesh") {
			t.Errorf("%s: no description or no example", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "help" && sub.Name() != "completion" && !sub.Hidden {
				walk(sub)
			}
		}
	}
	walk(newRoot(&env{stderr: &bytes.Buffer{}}))
}
