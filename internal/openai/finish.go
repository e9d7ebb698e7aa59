package openai

// Dropped reports whether a finish_reason says that the server gave the answer up: vLLM
// and SGLang say abort for a request that they threw out, vLLM error for a fault inside,
// and TensorRT-LLM cancelled and timeout. None of them is an end that OpenAI knows.
func Dropped(reason string) bool {
	switch reason {
	case "abort", "aborted", "cancelled", "canceled", "error", "timeout":
		return true
	}
	return false
}
