package openai

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"

	"github.com/go-json-experiment/json/jsontext"
)

// Paths of the endpoints that workers serve beside generation. The gateway passes
// them through unparsed, so they are no Endpoint.
const (
	EmbeddingsPath = "/v1/embeddings"
	TokenizePath   = "/tokenize"   // vLLM's
	DetokenizePath = "/detokenize" // vLLM's
)

// mostInputs is OpenAI's limit of texts in one embeddings request.
const mostInputs = 2048

// EmbeddingRequest is a parsed request for embeddings.
type EmbeddingRequest struct {
	Model      string
	Inputs     []Prompt
	Dimensions int  // 0 = the model's own number
	Base64     bool // vectors as base64 of little-endian float32
}

// ParseEmbedding reads the body of a request for embeddings.
func ParseEmbedding(body []byte) (*EmbeddingRequest, *Error) {
	p, err := scanBody(body)
	if err != nil {
		return nil, err
	}
	r := &EmbeddingRequest{Model: p.str("model"), Dimensions: p.integer("dimensions", 0, 1, 1<<20)}
	if p.err == nil && r.Model == "" {
		p.fail("model", "You must provide a model parameter.")
	}
	switch format := p.str("encoding_format"); format {
	case "", "float":
	case "base64":
		r.Base64 = true
	default:
		p.fail("encoding_format", "Invalid value: '%s'. Supported values are: 'float' and 'base64'.", clip(format))
	}
	if p.err == nil && p.r.Raw("input") == nil {
		p.fail("input", "Missing required parameter: 'input'.")
	}
	if p.err != nil {
		return nil, p.err
	}
	r.Inputs, err = decodeInputs(p.r.Raw("input"), "input", mostInputs)
	return r, err
}

// Generation is the request as an engine's Tokenize takes it: each input a prompt.
func (r *EmbeddingRequest) Generation() *Request {
	return &Request{
		Endpoint: Completions, Model: r.Model,
		prompts: func() ([]Prompt, *Error) { return r.Inputs, nil },
	}
}

// scanBody finds the top-level fields of a body that is no generation request.
func scanBody(body []byte) (*fieldParser, *Error) {
	r := &Request{body: body}
	if err := r.scan(); err != nil {
		return nil, err
	}
	return &fieldParser{r: r}, nil
}

// EmbeddingList is the answer of EmbeddingsPath.
type EmbeddingList struct {
	Object string         `json:"object"` // "list"
	Data   []Embedding    `json:"data"`
	Model  string         `json:"model"`
	Usage  EmbeddingUsage `json:"usage"`
}

// EmbeddingUsage counts the tokens of all inputs, twice as OpenAI does.
type EmbeddingUsage struct {
	PromptTokens int `json:"prompt_tokens"`
	TotalTokens  int `json:"total_tokens"`
}

// Embedding is the vector of one input.
type Embedding struct {
	Object    string `json:"object"` // "embedding"
	Index     int    `json:"index"`
	Embedding Vector `json:"embedding"`
}

// Vector is an embedding that knows how it is to be written.
type Vector struct {
	Values []float32
	Base64 bool
}

// MarshalJSON writes a list of numbers, or a string of base64.
func (v Vector) MarshalJSON() ([]byte, error) {
	if !v.Base64 {
		return json.Marshal(v.Values)
	}
	raw := make([]byte, 0, 4*len(v.Values))
	for _, f := range v.Values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(f))
	}
	return json.Marshal(base64.StdEncoding.EncodeToString(raw))
}

// UnmarshalJSON reads both forms.
func (v *Vector) UnmarshalJSON(raw []byte) error {
	if jsontext.Value(raw).Kind() != '"' {
		v.Base64 = false
		return json.Unmarshal(raw, &v.Values)
	}
	var b []byte // encoding/json decodes base64
	if err := json.Unmarshal(raw, &b); err != nil {
		return err
	}
	v.Base64, v.Values = true, make([]float32, len(b)/4)
	for i := range v.Values {
		v.Values[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return nil
}
