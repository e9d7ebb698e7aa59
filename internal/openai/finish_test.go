package openai

import "testing"

func TestDropped(t *testing.T) {
	for reason, want := range map[string]bool{
		"abort": true, "error": true, "cancelled": true, "timeout": true,
		"stop": false, "length": false, "tool_calls": false, "content_filter": false, "": false, "repetition": false,
	} {
		if Dropped(reason) != want {
			t.Errorf("%q: %v", reason, !want)
		}
	}
}
