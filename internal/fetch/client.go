package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// client is a package index's ordinary client. Both are told exactly which
// version to get and neither installs anything or runs code of a package, so
// PEP 668's mark of a managed Python does not matter.
type client string

const (
	pip client = "pip"
	npm client = "npm"
)

// attempts is how often a download is tried. The clients try again themselves
// while they connect; this covers a transfer that is cut.
const attempts = 3

// get downloads one package to s.tmp.
func (c client) get(ctx context.Context, cfg Config, p pkg, s staging) error {
	var err error
	for i := range attempts {
		if err = c.run(ctx, cfg, p, s); err == nil || !again(ctx, err) || i == attempts-1 {
			break
		}
		fmt.Fprintf(cfg.Progress, "\n%s: %v; trying again\n", p.file, err)
		if err := s.clearTmp(); err != nil {
			return err
		}
	}
	return err
}

// again says whether another attempt can end otherwise.
func again(ctx context.Context, err error) bool {
	_, wrong := errors.AsType[*HashError](err)
	var hint *hintError
	return ctx.Err() == nil && !wrong && !errors.As(err, &hint)
}

// run makes one attempt.
func (c client) run(ctx context.Context, cfg Config, p pkg, s staging) error {
	// The cache of either client is bypassed: what arrives is kept once, unpacked,
	// in our own.
	var cmd *exec.Cmd
	switch c {
	case pip:
		// Hashes can be required in a file only, not on the command line.
		req := filepath.Join(s.tmp(), "requirements.txt")
		line := fmt.Sprintf("%s==%s --hash=sha256:%s\n", p.name, p.version, p.sha256)
		if err := os.WriteFile(req, []byte(line), 0o644); err != nil {
			return err
		}
		args := []string{
			"-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes",
			"--ignore-requires-python", "--no-cache-dir", "--progress-bar", "off", "--no-input", "--disable-pip-version-check",
			"--dest", s.tmp(), "--requirement", req,
		}
		if p.platform != "" {
			args = append(args, "--platform", p.platform)
		}
		cmd = exec.CommandContext(ctx, cfg.Python, args...)
	case npm:
		cmd = exec.CommandContext(ctx, cfg.NPM, "pack", p.name+"@"+p.version,
			"--cache", filepath.Join(s.tmp(), "npm"), "--loglevel", "error", "--no-update-notifier")
	}
	// npm packs into the working folder; pip downloads through TMPDIR. Both on
	// the cache's own disk, where progress is read and the end is a rename.
	cmd.Dir = s.tmp()
	cmd.Env = append(environ(cfg), "TMPDIR="+s.tmp(), "PIP_REQUIRE_VIRTUALENV=0", "PIP_CONSTRAINT=")
	return c.wait(ctx, cmd, p)
}

// environ is the clients' environment.
func environ(cfg Config) []string {
	if cfg.Env != nil {
		return append([]string(nil), cfg.Env...)
	}
	return (&exec.Cmd{}).Environ()
}

// wait runs the client and turns its failure into an error that says what to do.
func (c client) wait(ctx context.Context, cmd *exec.Cmd, p pkg) error {
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	// python3 may be a wrapper that starts another process, so signals go to
	// all of them.
	cmd.SysProcAttr = processGroup()
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 3 * time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist):
		return withHint(fmt.Errorf("get %s: %w", p.file, err), c.installHint())
	}
	// pip compares the hash itself and removes the file, so the hash that it got
	// is only in what it prints.
	text := said.String()
	if got, ok := gotHash(text); ok {
		return wrongPackage(&HashError{File: p.file, Want: p.sha256, Got: got}, p)
	}
	err = fmt.Errorf("get %s: %s: %w: %s", p.file, c, err, lastLines(text, 3))
	switch {
	case strings.Contains(text, "No module named pip"):
		return withHint(err, c.installHint())
	case strings.Contains(text, "No matching distribution"), strings.Contains(text, "ETARGET"), strings.Contains(text, "E404"):
		return withHint(err, fmt.Sprintf("the package index that %s is set up for does not offer %s %s", c, p.name, p.version))
	}
	return err
}

// gotHash finds the hash in pip's report of a package that has another one.
func gotHash(text string) (string, bool) {
	m := regexp.MustCompile(`Got\s+([0-9a-f]{64})`).FindStringSubmatch(text)
	if m == nil {
		return "", false
	}
	return m[1], true
}

// installHint says how to get the client.
func (c client) installHint() string {
	if c == pip {
		return "install Python 3 with pip (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; macOS: brew install python)"
	}
	return "install npm (Debian, Ubuntu: apt install npm; Fedora: dnf install nodejs-npm; macOS: brew install node), or set KVMESH_LLAMA_LIB to your own llama.cpp libraries"
}

// wrongPackage explains a hash that differs.
func wrongPackage(err error, p pkg) error {
	return withHint(err, fmt.Sprintf("the index or a proxy between serves another %s %s than the pinned one; nothing was kept", p.name, p.version))
}

// lastLines returns the end of a client's output on one line.
func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " / ")
}
