package fetch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// Variable names the environment variable of the command that replaces an asset.
func Variable(name string) string {
	switch name {
	case Envoy:
		return "KVMESH_ENVOY"
	case Llama:
		return "KVMESH_LLAMA_LIB"
	case Model:
		return "KVMESH_MODEL"
	case S3:
		return "KVMESH_S3"
	default:
		return "KVMESH_REDIS"
	}
}

// own returns the user's own file for an asset, checked, and whether there is
// one. For the servers of tests that includes the system's.
func own(cfg Config, name string) (path string, ok bool, err error) {
	switch name {
	case Envoy:
		path, err = program(cfg.Envoy)
	case Llama:
		path, err = cfg.LlamaLib, libraries(cfg.LlamaLib, cfg.OS)
	case Model:
		path, err = cfg.Model, gguf(cfg.Model)
	case Redis:
		path, err = server(cfg.Redis, cfg.SystemRedis)
	case S3:
		path, err = server(cfg.S3, cfg.SystemS3)
	}
	if path == "" {
		return "", false, nil
	}
	if err != nil {
		return "", false, withHint(fmt.Errorf("%s=%s: %w", Variable(name), path, err),
			"correct it, or unset it to use the pinned "+name)
	}
	path, err = filepath.Abs(path)
	return path, err == nil, err
}

// server finds the user's own server, else the system's; "" is neither.
func server(own, system string) (string, error) {
	if own == "" && system != "-" {
		if found, err := exec.LookPath(system); err == nil {
			return found, nil
		}
	}
	return program(own)
}

// program finds what a variable names: a path, or a name without a slash that is
// looked up in PATH as a shell would.
func program(name string) (string, error) {
	if name == "" {
		return "", nil
	}
	if filepath.Base(name) != name {
		return name, executable(name)
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return name, errors.New("no such program in PATH; a file of this folder is ./" + name)
	}
	return path, nil
}

// executable checks that a file can be run.
func executable(path string) error {
	// Whether it is the right program shows when it is started; a version is not
	// asked for here, because that would run it on every `kvmesh fetch`.
	info, err := os.Stat(path)
	if err != nil {
		return plain(err)
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return errors.New("not an executable file")
	}
	return nil
}

// libraries checks that a folder has what yzma opens.
func libraries(dir, goos string) error {
	ext := ".so"
	if goos == "darwin" {
		ext = ".dylib"
	}
	info, err := os.Stat(dir)
	if err != nil {
		return plain(err)
	}
	if !info.IsDir() {
		return errors.New("not a folder; want the folder that holds libllama" + ext)
	}
	// By these very names, as yzma opens them; a build may need links.
	for _, lib := range []string{"libllama", "libggml", "libggml-base"} {
		if _, err := os.Stat(filepath.Join(dir, lib+ext)); err != nil {
			return fmt.Errorf("no %s%s in it", lib, ext)
		}
	}
	return nil
}

// gguf checks that a file begins as a model does.
func gguf(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return plain(err)
	}
	defer f.Close()
	// The first four bytes tell a model from an error page that was saved as one.
	var magic [4]byte
	if _, err := io.ReadFull(f, magic[:]); err != nil || string(magic[:]) != "GGUF" {
		return errors.New("not a GGUF file")
	}
	return nil
}

// plain takes the operation and the path off an error that is shown with it.
func plain(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err
	}
	return err
}
