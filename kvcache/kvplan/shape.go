package kvplan

import (
	"errors"
	"fmt"
)

// Group is some layers of one kind.
type Group struct {
	Layers int `json:"layers"`
	// Values is how many numbers one layer keeps of one token.
	Values int `json:"values_per_token"`
	// Window is how many tokens it keeps at most; 0 = all.
	Window int `json:"window,omitempty"`
}

// Shape is what of a model its KV depends on.
type Shape struct {
	// Arch is the architecture, as the metadata names it.
	Arch string `json:"arch"`
	// Bits is the size of one number in KV, 16 unless the metadata says otherwise.
	Bits   int     `json:"bits"`
	Groups []Group `json:"groups"`
	// Context is the longest sequence, in tokens; 0 = not said.
	Context int `json:"max_context,omitempty"`
	// Notes is what a reader should know about what was not said or not counted.
	Notes []string `json:"notes,omitempty"`
}

// most bounds each number of the metadata, so that products stay numbers.
const most = 1 << 24

// validate reports what cannot be a model.
func (s *Shape) validate() error {
	layers := 0
	for _, g := range s.Groups {
		if g.Layers < 0 || g.Layers > most || g.Values < 1 || g.Values > most || g.Window < 0 || g.Window > most {
			return fmt.Errorf("%d layers of %d values and a window of %d", g.Layers, g.Values, g.Window)
		}
		layers += g.Layers
	}
	if layers == 0 {
		return errors.New("no layer with attention")
	}
	if s.Bits < 1 || s.Bits > 64 {
		return fmt.Errorf("values of %d bits", s.Bits)
	}
	return nil
}

// TokenBytes is what one more token takes, in every layer, as the engine has it.
func (s *Shape) TokenBytes() int64 {
	n := int64(0)
	for _, g := range s.Groups {
		n += int64(g.Layers) * int64(g.Values)
	}
	return n * int64(s.Bits) / 8
}

// StreamBytes is what a sequence of so many tokens takes, as the engine has it.
func (s *Shape) StreamBytes(tokens int) int64 {
	n := int64(0)
	for _, g := range s.Groups {
		kept := tokens
		if g.Window > 0 {
			kept = min(kept, g.Window)
		}
		n += int64(g.Layers) * int64(g.Values) * int64(kept)
	}
	return n * int64(s.Bits) / 8
}

// heads are the sizes of attention.
type heads struct {
	kv, key, value int
	// latent is the rank of MLA with its rope dimension; 0 = none.
	latent int
}

// values is how many numbers one layer keeps of one token.
func (h heads) values() int {
	if h.latent > 0 {
		return h.latent
	}
	return h.kv * (h.key + h.value)
}

// windows splits layers into those with all tokens and those with a window: windowed says
// which of them is.
func windows(layers, values, window int, windowed func(int) bool) []Group {
	full, some := Group{Values: values}, Group{Values: values, Window: window}
	for i := range layers {
		if window > 0 && windowed(i) {
			some.Layers++
		} else {
			full.Layers++
		}
	}
	var out []Group
	for _, g := range []Group{full, some} {
		if g.Layers > 0 {
			out = append(out, g)
		}
	}
	return out
}

// every says which layers have a window where each nth has all tokens.
func every(n int) func(int) bool { return func(i int) bool { return n > 0 && (i+1)%n != 0 } }
