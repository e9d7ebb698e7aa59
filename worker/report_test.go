package worker

import "testing"

// How a continuation is said to have gone on: nothing that was quantized is exact.
func TestHowItWentOn(t *testing.T) {
	for name, tt := range map[string]struct {
		tok    Token
		byText bool
		want   string
	}{
		"exact":           {Token{Restored: 9, Exact: true}, false, modeExact},
		"restored":        {Token{Restored: 8}, false, modeRestored},
		"part of prompt":  {Token{Restored: 4}, false, modeReplayed},
		"nothing":         {Token{}, false, modeReplayed},
		"quantized":       {Token{Restored: 9, Lossy: true}, false, modeLossy},
		"quantized, part": {Token{Restored: 4, Lossy: true}, false, modeLossy},
		"text":            {Token{Restored: 9, Lossy: true}, true, modeText},
	} {
		r := &resumed{byText: tt.byText}
		r.report(&choice{tokenIDs: true, ids: make([]int32, 10), params: Params{Delivered: 3}}, tt.tok)
		if r.mode != tt.want || !tt.byText && r.restored+r.computed != 10 {
			t.Errorf("%s: %q with %d restored and %d computed, want %q", name, r.mode, r.restored, r.computed, tt.want)
		}
	}
}
