package tinymodel

import (
	"bytes"
	"os"
	"testing"
)

// TestSameForASeed: two files of a seed are equal, those of two seeds are not. That
// llama.cpp takes them is for the engine's tests to show.
func TestSameForASeed(t *testing.T) {
	read := func(seed uint64) []byte {
		path, err := Write(t.TempDir(), seed)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	one, again, other := read(1), read(1), read(2)
	if !bytes.Equal(one, again) || bytes.Equal(one, other) || len(one) != len(other) {
		t.Error("files of one seed differ, or those of two seeds do not")
	}
	if len(one) > 4<<20 {
		t.Errorf("the model has %d bytes, which is not tiny", len(one))
	}
}

func TestVocabularyHasEachTokenOnce(t *testing.T) {
	words, merges := vocabulary()
	if len(words) != special+256+len(merges) || words[Heading] != "<h1>" || words[EOS] != "</s>" {
		t.Errorf("%d tokens with %d merges", len(words), len(merges))
	}
	seen := make(map[string]bool)
	for _, w := range words {
		if seen[w] || w == "" {
			t.Errorf("token %q is there twice or empty", w)
		}
		seen[w] = true
	}
}

func TestWriteSaysWhere(t *testing.T) {
	if _, err := Write("/nonexistent/folder", 1); err == nil {
		t.Error("a file was written into a folder that is not there")
	}
}
