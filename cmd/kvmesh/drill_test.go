package main

import (
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// A drill counts tokens, whether they have a text of their own or not.
func TestDrillCountsTokens(t *testing.T) {
	h := &heard{}
	for _, event := range []string{
		`{"choices":[{"text":"a","token_ids":[1]}]}`,
		`{"choices":[{"text":"","token_ids":[2]}]}`,        // half a character
		`{"choices":[{"text":"é","token_ids":[3,4]}]}`,     // two at once
		`{"choices":[{"text":"","finish_reason":"stop"}]}`, // none
	} {
		if err := h.take(openai.Event{Data: []byte(event)}); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"1", "2", "3", "4"}; !slices.Equal(h.told(), want) || len(h.tokens) != 4 || len(h.times) != 4 {
		t.Errorf("told %q of %q, want %q", h.told(), h.tokens, want)
	}
	plain := &heard{}
	for _, event := range []string{`{"choices":[{"text":"a"}]}`, `{"choices":[{"text":"é"}]}`} {
		if err := plain.take(openai.Event{Data: []byte(event)}); err != nil {
			t.Fatal(err)
		}
	}
	if v := judge(h, h, 2); !v.Equal {
		t.Errorf("the same answer: %+v", v)
	}
	if v := judge(h, plain, 1); v.Equal || v.DivergedAt != 1 {
		t.Errorf("one without ids, held against it by text: %+v", v)
	}
}
