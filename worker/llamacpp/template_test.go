package llamacpp

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/openai"
)

func TestChatMLForModelsWithoutTemplate(t *testing.T) {
	tm, err := newTemplate("", "<s>", "</s>")
	if err != nil {
		t.Fatal(err)
	}
	got, err := tm.render(conversation{messages: []openai.Message{
		{Role: "developer", Content: "Be brief."},
		{Role: "user", Content: "Say {{ x }} & <b>"},
		{Role: "assistant", Content: "ok"},
		{Role: "user", Content: ""},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := "<|im_start|>system\nBe brief.<|im_end|>\n" +
		"<|im_start|>user\nSay {{ x }} & <b><|im_end|>\n" +
		"<|im_start|>assistant\nok<|im_end|>\n" +
		"<|im_start|>user\n<|im_end|>\n" +
		"<|im_start|>assistant\n"
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("prompt (-want +got):\n%s", d)
	}
}

func TestTemplateSeesNamesAndTokens(t *testing.T) {
	tm, err := newTemplate("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}{% if m.name is defined %}={{ m.name }}{% endif %}]{% endfor %}{{ eos_token }}", "<s>", "</s>")
	if err != nil {
		t.Fatal(err)
	}
	got, err := tm.render(conversation{messages: []openai.Message{{Role: "user", Name: "ann"}, {Role: "function"}}})
	if err != nil {
		t.Fatal(err)
	}
	if want := "<s>[user=ann][tool]</s>"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBrokenTemplateIsRefused(t *testing.T) {
	_, err := newTemplate("{% if %}", "", "")
	wantWords(t, err, "chat template")
}
