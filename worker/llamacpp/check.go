package llamacpp

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
)

// Versions that belong together: yzma's Go structs mirror the C structs of a span
// of llama.cpp builds, and llama_version is the only mark of a build that the
// libraries carry.
const (
	bindingVersion = "github.com/hybridgroup/yzma v1.28"
	engineVersion  = "0.5.0" // the release that is fetched
	// olderVersion is in the packages of some systems. Its structs are the same, and
	// the conformance suite passes with it.
	olderVersion = "0.4.0"
)

// libraryNames are the file names that must be in Config.LibDir, in the order in
// which they are loaded.
func libraryNames() []string {
	ext := ".so"
	if runtime.GOOS == "darwin" {
		ext = ".dylib"
	}
	return []string{"libggml-base" + ext, "libggml" + ext, "libllama" + ext}
}

// checkLibDir reports what is missing in the folder of libraries, all of it at
// once. The files of a release carry the version in their names; the binding looks
// for names without it, so links are needed, and a link that leads nowhere is the
// usual mistake after an update.
func checkLibDir(dir string) error {
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return fmt.Errorf("llama.cpp's library folder %s is not there: %w", dir, orNotDir(err))
	}
	var missing []string
	for _, name := range libraryNames() {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			continue
		}
		if to, err := os.Readlink(path); err == nil {
			missing = append(missing, fmt.Sprintf("%s (a link to %s, which is not there)", name, to))
			continue
		}
		missing = append(missing, name)
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("llama.cpp's library folder %s lacks %s (want the files of llama.cpp v%s, with links without a version in the name)",
		dir, strings.Join(missing, ", "), engineVersion)
}

func orNotDir(err error) error {
	if err == nil {
		return errors.New("not a directory")
	}
	return err
}

// checkModelFile reports a model file that is missing or no GGUF: a download that
// ended early, or a page that says it was not found.
func checkModelFile(path string) (fs.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the model: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open the model: %w", err)
	}
	magic := make([]byte, 4)
	if _, err := io.ReadFull(f, magic); err != nil || string(magic) != "GGUF" {
		return nil, fmt.Errorf("the model %s is not a GGUF file: it begins with %q", path, magic)
	}
	return st, nil
}

// checkVersion compares what libllama reports with what the binding mirrors.
func checkVersion(dir, got string) error {
	for _, want := range []string{engineVersion, olderVersion} {
		if got == want || strings.HasPrefix(got, want+"-") {
			return nil
		}
	}
	if got == "" {
		got = "none"
	}
	return fmt.Errorf("the llama.cpp in %s reports version %s, but this program's binding (%s) reads the structs of versions %s and %s: use those libraries", dir, got, bindingVersion, engineVersion, olderVersion)
}

// explainLoad adds to a loader's error which package has the missing library. The
// dynamic linker reports the library that was not found, which is often not the one
// that was asked for.
func explainLoad(err error) error {
	m := regexp.MustCompile(`([\w+.-]+\.so[.\d]*): cannot open shared object file`).FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	if pkg := debianPackage(m[1]); pkg != "" {
		return fmt.Errorf("the system library %s is missing; on Debian and Ubuntu: apt-get install %s: %w", m[1], pkg, err)
	}
	return err
}

// debianPackage names the Debian package of a system library.
func debianPackage(lib string) string {
	switch lib {
	case "libffi.so.8":
		return "libffi8"
	case "libstdc++.so.6":
		return "libstdc++6"
	case "libgcc_s.so.1":
		return "libgcc-s1"
	case "libgomp.so.1":
		return "libgomp1"
	}
	return ""
}
