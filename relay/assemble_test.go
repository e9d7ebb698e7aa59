package relay

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// Choices begin one after the other, while those before them go on.
func TestAssembleChoices(t *testing.T) {
	var w assembler
	for round := range 20 {
		for i := range round%8 + 1 {
			if err := w.add(fmt.Appendf(nil, `{"id":"a","choices":[{"index":%d,"text":"%d."}]}`, i, round), false); err != nil {
				t.Fatal(err)
			}
		}
	}
	raw, err := json.Marshal(w.answer(false))
	if err != nil {
		t.Fatal(err)
	}
	var c openai.Completion
	if err := json.Unmarshal(raw, &c); err != nil || len(c.Choices) != 8 {
		t.Fatalf("%s, %v", raw, err)
	}
	for i, ch := range c.Choices {
		var want strings.Builder
		for round := range 20 {
			if i <= round%8 {
				want.WriteString(fmt.Sprintf("%d.", round))
			}
		}
		if ch.Index != i || ch.Text != want.String() {
			t.Errorf("choice %d: %q, want %q", i, ch.Text, want.String())
		}
	}
}

// What a worker names must not make the relay hold as much as it likes.
func TestAssembleRefuses(t *testing.T) {
	for _, data := range []string{
		`{"choices":[{"index":-1,"text":"x"}]}`,
		`{"choices":[{"index":1000000000,"text":"x"}]}`,
		`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":-1}]}}]}`,
		`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1000000000}]}}]}`,
	} {
		var w assembler
		if err := w.add([]byte(data), true); err == nil {
			t.Errorf("%s was taken", data)
		}
	}
}
