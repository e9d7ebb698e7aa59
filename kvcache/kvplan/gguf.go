package kvplan

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// The limits of what is read of a GGUF file.
const (
	mostFields = 1 << 16
	mostText   = 1 << 20
	mostItems  = 1 << 26
	mostDepth  = 4
)

// patterns are the architectures of which llama.cpp has each nth layer keep all tokens and
// the others a window, and which do not say so in the file.
func patterns(arch string) int {
	switch arch {
	case "gemma2", "gpt-oss":
		return 2
	case "cohere2":
		return 4
	case "gemma3n":
		return 5
	case "gemma3":
		return 6
	}
	return 0
}

// ParseGGUF reads the header of a GGUF file, and no tensor.
func ParseGGUF(r io.Reader) (Shape, error) {
	g := &ggufReader{r: bufio.NewReaderSize(r, 1<<16), numbers: map[string][]int{}, texts: map[string]string{}}
	if err := g.read(); err != nil {
		return Shape{}, fmt.Errorf("header of a GGUF file: %w", err)
	}
	s, err := g.shape()
	if err != nil {
		return Shape{}, fmt.Errorf("GGUF file of %q: %w", g.texts["general.architecture"], err)
	}
	return s, nil
}

// ggufReader reads fields. Of lists it keeps numbers, as many as a model has layers.
type ggufReader struct {
	r       *bufio.Reader
	numbers map[string][]int
	texts   map[string]string
}

func (g *ggufReader) read() error {
	var head [24]byte
	if _, err := io.ReadFull(g.r, head[:]); err != nil || string(head[:4]) != "GGUF" {
		return errors.New("it does not begin with GGUF")
	}
	le := binary.LittleEndian
	if v := le.Uint32(head[4:]); v != 2 && v != 3 {
		return fmt.Errorf("version %d, known are 2 and 3", v)
	}
	n := le.Uint64(head[16:])
	if n > mostFields {
		return fmt.Errorf("%d fields", n)
	}
	for range n {
		key, err := g.text()
		if err != nil {
			return err
		}
		kind, err := g.uint(4)
		if err == nil {
			err = g.value(key, kind, 0)
		}
		if err != nil {
			return fmt.Errorf("field %.80q: %w", key, err)
		}
	}
	return nil
}

// uint reads an integer of some bytes.
func (g *ggufReader) uint(size int) (uint64, error) {
	var b [8]byte
	if _, err := io.ReadFull(g.r, b[:size]); err != nil {
		return 0, errors.New("it ends too early")
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}

// text reads a text.
func (g *ggufReader) text() (string, error) {
	n, err := g.uint(8)
	if err != nil {
		return "", err
	}
	if n > mostText {
		return "", fmt.Errorf("text of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(g.r, b); err != nil {
		return "", errors.New("it ends too early")
	}
	return string(b), nil
}

// sizes of the types of numbers, by their number.
func sizeOf(kind uint64) int {
	switch kind {
	case 0, 1, 7:
		return 1
	case 2, 3:
		return 2
	case 4, 5, 6:
		return 4
	case 10, 11, 12:
		return 8
	}
	return 0
}

// value reads a value of a type and keeps it if it is a number or a text.
func (g *ggufReader) value(key string, kind uint64, depth int) error {
	switch size := sizeOf(kind); {
	case size > 0:
		n, err := g.uint(size)
		if err == nil && kind != 6 && kind != 12 && n <= most && len(g.numbers[key]) < maxLayers {
			g.numbers[key] = append(g.numbers[key], int(n))
		}
		return err
	case kind == 8:
		s, err := g.text()
		if depth == 0 {
			g.texts[key] = s
		}
		return err
	case kind == 9:
		return g.list(key, depth)
	}
	return fmt.Errorf("unknown type %d", kind)
}

// list reads a list.
func (g *ggufReader) list(key string, depth int) error {
	kind, err := g.uint(4)
	if err != nil {
		return err
	}
	n, err := g.uint(8)
	if err != nil {
		return err
	}
	if n > mostItems || depth == mostDepth {
		return fmt.Errorf("list of %d items", n)
	}
	for range n {
		if err := g.value(key, kind, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// number is a field of the model's architecture, 0 if there is none.
func (g *ggufReader) number(name string) int {
	if list := g.numbers[g.texts["general.architecture"]+"."+name]; len(list) > 0 {
		return list[0]
	}
	return 0
}

// shape says what the fields mean.
func (g *ggufReader) shape() (Shape, error) {
	arch := g.texts["general.architecture"]
	s := Shape{Arch: arch, Bits: 16, Context: g.number("context_length"), Notes: []string{"KV is taken to have 16 bits, the default of llama.cpp"}}
	layers, count := g.number("block_count"), g.number("attention.head_count")
	if arch == "" || layers < 1 || layers > maxLayers || count < 1 {
		return Shape{}, errors.New("no block_count or no attention.head_count")
	}
	dim := g.number("embedding_length") / count
	h := heads{key: cmp.Or(g.number("attention.key_length"), dim), value: cmp.Or(g.number("attention.value_length"), dim)}
	if rank := g.number("attention.kv_lora_rank"); rank > 0 {
		h.latent = rank + g.number("rope.dimension_count")
	}
	kv := g.numbers[arch+".attention.head_count_kv"]
	if len(kv) == 0 {
		kv = []int{count}
	}
	window := g.number("attention.sliding_window")
	pattern := patterns(arch)
	if window > 0 && pattern == 0 {
		s.Notes = append(s.Notes, "which layers have a window is not known of this architecture: all are counted in full")
	}
	windowed := every(pattern)
	for i := range layers {
		h.kv = kv[min(i, len(kv)-1)]
		one := Group{Layers: 1, Values: h.values()}
		if window > 0 && windowed(i) {
			one.Window = window
		}
		if one.Values > 0 { // some have layers without attention
			s.add(one)
		}
	}
	return s, s.validate()
}

// add counts a layer with those that are like it.
func (s *Shape) add(one Group) {
	for i := range s.Groups {
		if g := &s.Groups[i]; g.Values == one.Values && g.Window == one.Window {
			g.Layers += min(one.Layers, math.MaxInt32-g.Layers)
			return
		}
	}
	s.Groups = append(s.Groups, one)
}
