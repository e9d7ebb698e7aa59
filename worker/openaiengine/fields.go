package openaiengine

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// way is how a stream would go on.
type way struct {
	kind     Kind
	endpoint openai.Endpoint
	byText   bool
}

// check refuses the first field, by name, of which it is not known that the server's
// answer stays the same when delivered tokens stand at the end of its prompt. A server
// keeps more of what it says than tokens: where a grammar stands, which words have been
// said how often, what may not follow. So the fields that go on are listed, and not those
// that do not, of which each version has more.
func (w way) check(fields map[string]json.RawMessage) error {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if raw := fields[name]; string(raw) != "null" && !plain(name) && !neutral(name, raw) && !w.keeps(name, raw) {
			return refuse("of the field '" + name[:min(len(name), 64)] + "' it is not known that the answer goes on with it as it was")
		}
	}
	if raw, ok := fields["messages"]; ok && !onlyText(raw) {
		return refuse("its messages hold more than text")
	}
	return nil
}

// plain lists the fields that steer each token alone, by its logits, that are counted or
// looked for here, and that change nothing of the answer.
func plain(name string) bool {
	switch name {
	case "model", "prompt", "messages", "stream", "n", "return_token_ids", "parallel_tool_calls",
		"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", // each token alone
		"ignore_eos", "stop_token_ids", "skip_special_tokens",
		"max_tokens", "max_completion_tokens", "min_tokens", "stop", "include_stop_str_in_output", // counted or looked for here
		"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
		"priority", "cache_salt", "request_id":
		return true
	}
	return false
}

// keeps lists the fields that go on at some servers, or in one of the two ways.
func (w way) keeps(name string, raw json.RawMessage) bool {
	switch name {
	case "stream_options":
		return onlyUsage(raw)
	case "repetition_penalty": // over prompt and answer alike there; elsewhere over the answer, or it is not known
		return w.kind == VLLM || w.kind == TGI
	case "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty": // llama.cpp counts the last tokens, whosever
		return w.kind == LlamaCP
	case "typical_p", "top_n_sigma", "min_keep", "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold", "cache_prompt", "id_slot", "lora":
		return w.kind == LlamaCP
	case "lora_path":
		return w.kind == SGLang
	case "chat_template_kwargs": // vLLM uses them otherwise where a message goes on
		return !w.byText || w.kind != VLLM
	case "add_generation_prompt":
		return !w.byText || string(raw) == "true"
	case "continue_final_message":
		return !w.byText || string(raw) == "false"
	case "add_special_tokens":
		return !w.byText || w.endpoint == openai.Completions
	case "chat_template":
		return !w.byText
	}
	return false
}

// neutral reports whether a field has the value that stands for none of it.
func neutral(name string, raw json.RawMessage) bool {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return false
	}
	list, isList := v.([]any)
	switch name {
	case "presence_penalty", "frequency_penalty", "top_logprobs", "n_probs", "top_n_tokens", "mirostat", "dry_multiplier", "xtc_probability":
		return v == 0.0
	case "repetition_penalty", "repeat_penalty", "best_of", "length_penalty":
		return v == 1.0
	case "echo", "logprobs", "use_beam_search", "return_tokens_as_token_ids", "return_hidden_states", "no_stop_trim", "watermark",
		"timings_per_token", "return_progress", "post_sampling_probs":
		return v == false
	case "include_reasoning", "separate_reasoning", "spaces_between_special_tokens":
		return v == true
	case "suffix", "grammar", "regex", "ebnf", "guided_regex", "guided_grammar":
		return v == ""
	case "tools", "functions", "documents", "bad_words", "logits_processors":
		return isList && len(list) == 0
	case "tool_choice", "function_call":
		return v == "none" || v == "auto"
	case "modalities":
		return isList && len(list) == 1 && list[0] == "text"
	case "response_format":
		m, ok := v.(map[string]any)
		return ok && len(m) == 1 && m["type"] == "text"
	}
	return false
}

// onlyUsage reports whether a stream's options ask for no more than the usage at its end.
func onlyUsage(raw json.RawMessage) bool {
	var options map[string]json.RawMessage
	if json.Unmarshal(raw, &options) != nil {
		return false
	}
	for name, v := range options {
		if name != "include_usage" && name != "include_obfuscation" && string(v) != "false" && string(v) != "null" {
			return false
		}
	}
	return true
}

// onlyText reports whether messages are text and nothing that a prompt of tokens or of
// text would lose, as an image.
func onlyText(raw json.RawMessage) bool {
	var messages []struct {
		Content json.RawMessage `json:"content"`
		Audio   json.RawMessage `json:"audio"`
	}
	if json.Unmarshal(raw, &messages) != nil {
		return false
	}
	for _, m := range messages {
		if !textContent(m.Content) || len(m.Audio) > 0 && string(m.Audio) != "null" {
			return false
		}
	}
	return true
}

// textContent reports whether a message's content is a string, or parts of text.
func textContent(raw json.RawMessage) bool {
	if len(raw) == 0 || raw[0] == '"' || string(raw) == "null" {
		return true
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return false
	}
	return !slices.ContainsFunc(parts, func(raw json.RawMessage) bool {
		var part map[string]json.RawMessage
		if len(raw) > 0 && raw[0] == '"' {
			return false
		}
		return json.Unmarshal(raw, &part) != nil || string(part["type"]) != `"text"` || len(part) != 2 || len(part["text"]) == 0 || part["text"][0] != '"'
	})
}
