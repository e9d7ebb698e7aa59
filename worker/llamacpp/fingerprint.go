package llamacpp

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/internal/filesum"
)

// fingerprint identifies what KV is worth: the same weights, engine build and
// layout. Parts are joined so that no two lists give the same text.
func fingerprint(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// weightsID identifies a model by the content of its files: their SHA-256,
// remembered in cacheDir, or samples of them when cacheDir is empty. Neither
// depends on the path or time of a file, so copies on other hosts are equal; the
// two kinds never equal each other.
func weightsID(path, cacheDir string) (string, error) {
	var ids []string
	for _, part := range modelFiles(path) {
		st, err := os.Stat(part)
		if err != nil {
			return "", err
		}
		id, err := fileID(part, st, cacheDir)
		if err != nil {
			return "", err
		}
		ids = append(ids, id)
	}
	return strings.Join(ids, ","), nil
}

// weightsName is how a model's weights are called where they are compared with those of its
// other versions: as weightsID has them, or a hash of that for several files.
func weightsName(id string) string {
	if kind, _, ok := strings.Cut(id, ":"); ok && strings.Contains(id, ",") {
		return kind + ":" + fingerprint(id)
	}
	return id
}

// modelFiles lists the files of a model: llama.cpp opens the others by itself when
// it is given the first of NAME-00001-of-0000N.gguf.
func modelFiles(path string) []string {
	m := regexp.MustCompile(`^(.*)-00001-of-(\d{5})\.gguf$`).FindStringSubmatch(path)
	if m == nil {
		return []string{path}
	}
	n, _ := strconv.Atoi(m[2]) // five digits
	var files []string
	for i := 1; i <= n; i++ {
		files = append(files, fmt.Sprintf("%s-%05d-of-%s.gguf", m[1], i, m[2]))
	}
	return files
}

// fileID identifies one file.
func fileID(path string, st fs.FileInfo, cacheDir string) (string, error) {
	if cacheDir == "" {
		return sampledID(path, st.Size())
	}
	sum, err := filesum.SHA256(context.Background(), path, cacheDir)
	if err != nil {
		return "", err
	}
	return "sha256:" + sum, nil
}

// Samples of a file: the head, where a GGUF keeps its metadata, is among them,
// and so is the tail.
const (
	sampleCount = 256
	sampleBytes = 64 << 10
)

// sampledID hashes the size and evenly spread samples: 16 MiB, some milliseconds.
// Two models that differ in a few weights only could escape it; whoever shares KV
// between hosts should give a CacheDir.
func sampledID(path string, size int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_ = binary.Write(h, binary.LittleEndian, size) // a hash takes every write
	last := max(size-sampleBytes, 0)
	for i := range int64(sampleCount) {
		at := last / (sampleCount - 1) * i
		if i == sampleCount-1 {
			at = last
		}
		if _, err := io.Copy(h, io.NewSectionReader(f, at, sampleBytes)); err != nil {
			return "", fmt.Errorf("sample %s: %w", path, err)
		}
	}
	return "sampled:" + hex.EncodeToString(h.Sum(nil)), nil
}
