package openai

// Usage counts the tokens of a whole request: each prompt once however many
// choices it has, and every generated token of every choice, the end token of
// the model and the tokens of a stop string included.
type Usage struct {
	PromptTokens        int                  `json:"prompt_tokens"`
	CompletionTokens    int                  `json:"completion_tokens"`
	TotalTokens         int                  `json:"total_tokens"`
	PromptTokensDetails *PromptTokensDetails `json:"prompt_tokens_details,omitempty"`
}

// PromptTokensDetails splits Usage.PromptTokens.
type PromptTokensDetails struct {
	CachedTokens int `json:"cached_tokens"` // not prefilled again
}

// ChatCompletion is the answer of Chat without streaming.
type ChatCompletion struct {
	ID                string       `json:"id"`
	Object            string       `json:"object"` // "chat.completion"
	Created           int64        `json:"created"`
	Model             string       `json:"model"`
	SystemFingerprint string       `json:"system_fingerprint,omitempty"`
	Choices           []ChatChoice `json:"choices"`
	Usage             *Usage       `json:"usage,omitempty"`
}

// ChatChoice is one answer of a ChatCompletion.
type ChatChoice struct {
	Index        int           `json:"index"`
	Message      ChatMessage   `json:"message"`
	Logprobs     *ChatLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

// ChatMessage is the assistant's message.
type ChatMessage struct {
	Role    string  `json:"role"`
	Content string  `json:"content"` // null when empty beside ToolCalls
	Refusal *string `json:"refusal"`

	ToolCalls []ToolCall `json:"tool_calls,omitempty"`
}

// ChatLogprobs holds one entry per token of the content.
type ChatLogprobs struct {
	Content []TokenLogprob `json:"content"`
	Refusal []TokenLogprob `json:"refusal"`
}

// TokenLogprob is one token with its natural-log probability. Bytes are the
// token's exact bytes, for tokens that are only a part of a character.
type TokenLogprob struct {
	Token       string       `json:"token"`
	Logprob     float64      `json:"logprob"`
	Bytes       []int        `json:"bytes"`
	TopLogprobs []TopLogprob `json:"top_logprobs"`
}

// TopLogprob is one alternative at the place of a TokenLogprob.
type TopLogprob struct {
	Token   string  `json:"token"`
	Logprob float64 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

// Completion is the answer of Completions without streaming.
type Completion struct {
	ID                string       `json:"id"`
	Object            string       `json:"object"` // "text_completion", also of chunks
	Created           int64        `json:"created"`
	Model             string       `json:"model"`
	SystemFingerprint string       `json:"system_fingerprint,omitempty"`
	Choices           []TextChoice `json:"choices"`
	Usage             *Usage       `json:"usage,omitempty"`
}

// TextChoice is one answer of a Completion.
type TextChoice struct {
	Text         string        `json:"text"`
	Index        int           `json:"index"`
	Logprobs     *TextLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

// TextLogprobs holds parallel lists with one element per token.
type TextLogprobs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogprobs []float64            `json:"token_logprobs"`
	TopLogprobs   []map[string]float64 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"` // in characters of the choice's text
}

// Chunk is one event of a stream as a reader sees it, of either endpoint.
type Chunk struct {
	ID                string        `json:"id"`
	Object            string        `json:"object"`
	Created           int64         `json:"created"`
	Model             string        `json:"model"`
	SystemFingerprint string        `json:"system_fingerprint"`
	Choices           []ChunkChoice `json:"choices"`
	Usage             *Usage        `json:"usage"`
}

// ChunkChoice is one choice of a Chunk: Delta from Chat, Text from Completions.
// The form of its logprobs differs between the two, so they are left out here.
type ChunkChoice struct {
	Index        int     `json:"index"`
	Delta        *Delta  `json:"delta"`
	Text         string  `json:"text"`
	FinishReason *string `json:"finish_reason"`
}

// Delta is what a chat chunk adds.
type Delta struct {
	Role    string `json:"role"`
	Content string `json:"content"`

	ToolCalls []ToolCallDelta `json:"tool_calls"`
}

// Added is the text that the choice adds, of either endpoint.
func (c ChunkChoice) Added() string {
	if c.Delta != nil {
		return c.Delta.Content
	}
	return c.Text
}

// ModelCard is one entry of GET /v1/models.
type ModelCard struct {
	ID          string `json:"id"`
	Object      string `json:"object"` // "model"
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	Root        string `json:"root,omitempty"`          // name of the loaded model when ID is an alias (vLLM's field)
	MaxModelLen int    `json:"max_model_len,omitempty"` // context length in tokens (vLLM's field)
}

// ModelList is the answer of GET /v1/models.
type ModelList struct {
	Object string      `json:"object"` // "list"
	Data   []ModelCard `json:"data"`
}
