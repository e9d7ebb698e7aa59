package supervise

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "lock")
	if pid, held := Holder(path); held || pid != 0 {
		t.Errorf("a missing file is held by %d", pid)
	}
	l, err := Take(path)
	if err != nil {
		t.Fatal(err)
	}
	if pid, held := Holder(path); !held || pid != os.Getpid() {
		t.Errorf("held = %v by %d, want by this process", held, pid)
	}
	_, err = Take(path)
	if h, ok := errors.AsType[*HeldError](err); !ok || h.PID != os.Getpid() || !strings.Contains(err.Error(), path) {
		t.Errorf("second Take: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, held := Holder(path); held {
		t.Error("held after Close")
	}
	// What a longer id left must not show through.
	if err := os.WriteFile(path, []byte("123456789012\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err = Take(path); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if pid, _ := Holder(path); pid != os.Getpid() {
		t.Errorf("signed by %d", pid)
	}
	if err := (*Lock)(nil).Close(); err != nil {
		t.Error(err)
	}
}

// A lock ends with its process, however that ends, and children do not keep it.
func TestLockEndsWithItsProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	cmd := exec.Command(os.Args[0])
	cmd.Env = roleEnv("locker", "LOCK="+path)
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lock is held", func() bool { pid, held := Holder(path); return held && pid == cmd.Process.Pid })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed: the error says so
	eventually(t, "the lock is free", func() bool { _, held := Holder(path); return !held })
}

// A lock of a file that was removed meanwhile keeps nobody out, so it is not one.
func TestLockOfARemovedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	old, err := Take(path)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if old.Holds() {
		t.Error("the removed file passes for the one of that name")
	}
	l, err := Take(path)
	if err != nil {
		t.Fatalf("a new file of that name is not free: %v", err)
	}
	defer l.Close()
}

func TestTempDir(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir("sub", 0o700); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(dir, strings.Repeat("l", 100))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ want, dir, complaint string }{
		"none":     {"", "/tmp", ""},
		"relative": {"sub", filepath.Join(dir, "sub"), ""},
		"missing":  {filepath.Join(dir, "none"), "/tmp", "no such folder"},
		"a file":   {file, "/tmp", "not a folder"},
		"below it": {filepath.Join(file, "x"), "/tmp", "not a directory"},
		"long":     {long, "/tmp", "too long"},
	} {
		got, complaint, err := TempDir(tt.want, "kvmesh-1/s.sock")
		if err != nil || got != tt.dir || (complaint == nil) != (tt.complaint == "") {
			t.Errorf("%s: %q, %v, %v; want %q", name, got, complaint, err, tt.dir)
		}
		if complaint != nil && (!strings.Contains(complaint.Error(), tt.complaint) || !strings.HasPrefix(complaint.Error(), "TMPDIR="+tt.want)) {
			t.Errorf("%s: complaint %q, want TMPDIR=… %q", name, complaint, tt.complaint)
		}
	}
	// Where not even /tmp does, the hint names the variable.
	_, _, err := TempDir(dir, strings.Repeat("x", 120))
	var hint interface{ Hint() string }
	if !errors.As(err, &hint) || !strings.Contains(hint.Hint(), "TMPDIR") {
		t.Errorf("err = %v", err)
	}
}

// The folder goes although what was killed still makes files in it.
func TestReapRemovesWhatIsStillWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `i=0; while mkdir "$0/$i"; do i=$((i+1)); : >"$0/$((i-1))/f"; done`, dir)
	cmd.SysProcAttr = Attr()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it writes", func() bool { _, err := os.Stat(filepath.Join(dir, "20")); return err == nil })
	in := strings.NewReader("dir " + dir + "\n+" + strconv.Itoa(cmd.Process.Pid) + "\n")
	if err := Reap(in); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // killed: the error says so
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("folder still there: %v", err)
	}
}
