package openaiengine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// withTokenIDs asks the server for the ids of what it generates, which vLLM sends in
// the field that the relay reads. Others do not know the field.
func withTokenIDs(body []byte, req *openai.Request) []byte {
	if req.Raw("return_token_ids") != nil || !req.Stream {
		return body
	}
	at := bytes.IndexByte(body, '{') + 1
	return slices.Concat(body[:at], []byte(`"return_token_ids":true,`), body[at:])
}

// continuation is a stream that goes on from delivered tokens: the same prompt and
// those tokens, as ids, through the completions endpoint, whatever the stream's own.
type continuation struct {
	req       *openai.Request
	delivered worker.Delivered
	prompt    int    // tokens of the prompt alone
	owed      []byte // text of the delivered tokens that was not delivered with them
	body      []byte // for the server
}

// resume continues a stream.
func (e *Engine) resume(w http.ResponseWriter, r *http.Request, f *worker.Forwarded) error {
	c, err := e.continuation(r.Context(), f)
	if bad, ok := errors.AsType[*openai.Error](err); ok {
		bad.Write(w)
		return nil
	}
	var resp *http.Response
	if err == nil {
		resp, err = e.post(r.Context(), string(openai.Completions), c.body)
	}
	if err != nil {
		openai.Unavailable(0, "The server behind this worker did not continue the stream.").Write(w)
		return err
	}
	defer resp.Body.Close()
	return c.relay(w, resp.Body, e.model.Name)
}

// continuation prepares the server's request. Errors of the type *openai.Error say
// why the stream cannot go on here.
func (e *Engine) continuation(ctx context.Context, f *worker.Forwarded) (*continuation, error) {
	e.mu.Lock()
	kind := e.kind
	e.mu.Unlock()
	refuse := func(why string) error {
		return openai.Invalid("kvmesh.resume", "This engine cannot continue the stream: %s.", why)
	}
	switch {
	case kind != VLLM:
		return nil, refuse("the server takes or gives no token ids")
	case f.N != 1 || len(f.Delivered) != 1 || f.Delivered[0].Index != 0 || !f.Stream:
		return nil, refuse("only streams of one choice can be continued")
	case f.TopLogprobs >= 0 || f.Raw("tools") != nil || f.Raw("response_format") != nil || f.Echo || f.Presence != 0 || f.Frequency != 0:
		return nil, refuse("what it carries is more than its tokens")
	}
	c := &continuation{req: f.Request, delivered: f.Delivered[0]}
	prompt, err := e.promptIDs(ctx, f.Request)
	if err != nil {
		return nil, err
	}
	c.prompt = len(prompt)
	if c.owed, err = e.owed(ctx, c.delivered); err != nil {
		return nil, err
	}
	if c.owed == nil {
		return nil, refuse("its tokens end inside of a character")
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(f.Rewritten(e.name, 0), &fields); err != nil {
		return nil, err
	}
	for _, name := range []string{"messages", "max_completion_tokens", "top_logprobs", "logprobs", "tool_choice"} {
		delete(fields, name)
	}
	left := e.model.ContextLen - c.prompt - len(c.delivered.TokenIDs)
	if f.MaxTokens > 0 {
		left = f.MaxTokens - len(c.delivered.TokenIDs)
	} else if f.Endpoint == openai.Completions {
		left = 16 - len(c.delivered.TokenIDs) // the endpoint's default
	}
	if left < 1 {
		return nil, refuse("it has all its tokens")
	}
	for name, v := range map[string]any{
		"prompt": slices.Concat(prompt, c.delivered.TokenIDs), "max_tokens": left,
		"return_token_ids": true, "stream_options": map[string]bool{"include_usage": true},
	} {
		if fields[name], err = json.Marshal(v); err != nil {
			return nil, err
		}
	}
	c.body, err = json.Marshal(fields)
	return c, err
}

// promptIDs has the server turn the request's prompt into ids.
func (e *Engine) promptIDs(ctx context.Context, req *openai.Request) ([]int32, error) {
	ask := map[string]json.RawMessage{}
	if req.Endpoint == openai.Completions {
		prompts, bad := req.DecodePrompts()
		if bad != nil {
			return nil, bad
		}
		if len(prompts) != 1 {
			return nil, openai.Invalid("kvmesh.resume", "This engine cannot continue a stream of several prompts.")
		}
		if prompts[0].IDs != nil {
			return prompts[0].IDs, nil
		}
		ask["prompt"] = req.Raw("prompt")
	} else {
		for _, name := range []string{"messages", "add_generation_prompt", "chat_template_kwargs", "continue_final_message"} {
			if raw := req.Raw(name); raw != nil {
				ask[name] = raw
			}
		}
	}
	ask["model"], _ = json.Marshal(e.name) // a string always marshals
	var answer openai.Tokenized
	if err := e.ask(ctx, openai.TokenizePath, ask, &answer); err != nil {
		return nil, err
	}
	return answer.Tokens, nil
}

// owed is the text of the delivered tokens behind what was delivered of it, nil when
// the tokens end inside of a character.
func (e *Engine) owed(ctx context.Context, d worker.Delivered) ([]byte, error) {
	if len(d.TokenIDs) == 0 {
		return []byte{}, nil
	}
	var answer openai.Detokenized
	if err := e.ask(ctx, openai.DetokenizePath, map[string]any{"model": e.name, "tokens": d.TokenIDs}, &answer); err != nil {
		return nil, err
	}
	text := answer.Prompt
	if strings.HasSuffix(text, string(utf8.RuneError)) {
		return nil, nil
	}
	if d.TextBytes > len(text) {
		return nil, openai.Invalid("kvmesh.resume", "Invalid 'kvmesh.resume': %d bytes of text were delivered, the tokens have %d.", d.TextBytes, len(text))
	}
	return []byte(text[d.TextBytes:]), nil
}

// ask posts JSON and reads JSON.
func (e *Engine) ask(ctx context.Context, path string, body, answer any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	resp, err := e.post(ctx, path, raw)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(answer); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// post sends JSON; the answer is 200.
func (e *Engine) post(ctx context.Context, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.upstream.JoinPath(path).String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	e.authorize(req.Header)
	resp, err := e.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, &statusError{path, resp.StatusCode}
	}
	return resp, nil
}

// chunk is one event of the server's stream.
type chunk struct {
	ID      string `json:"id"`
	Created int64  `json:"created"`
	Choices []struct {
		Text         string  `json:"text"`
		TokenIDs     []int32 `json:"token_ids"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *openai.Usage   `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// mostEvent bounds one event of the server.
const mostEvent = 4 << 20

// relay writes the server's stream in the form of the request's endpoint, as if it
// had been one from the start: the owed text first, and the usage of all of it.
func (c *continuation) relay(w http.ResponseWriter, from io.Reader, model string) error {
	events := openai.NewEventReader(from, mostEvent)
	out := stream{w: w, c: c, model: model}
	for {
		ev, err := events.Next()
		if err != nil {
			return out.broken(fmt.Errorf("the server's stream broke off: %w", err))
		}
		if ev.Done() {
			return out.end()
		}
		var got chunk
		if err := json.Unmarshal(ev.Data, &got); err != nil || got.Error != nil {
			return out.broken(fmt.Errorf("the server's stream ended in %.200q", ev.Data))
		}
		if err := out.add(got); err != nil {
			return nil // the client left
		}
	}
}

// stream is the client's side of a continuation.
type stream struct {
	w      http.ResponseWriter
	c      *continuation
	model  string
	chunks *openai.Chunks // nil before the first event
	usage  openai.Usage
}

// add writes one event of the server.
func (s *stream) add(got chunk) error {
	if s.chunks == nil {
		s.chunks = openai.NewChunks(openai.Answer{
			Endpoint: s.c.req.Endpoint, ID: got.ID, Model: s.model, Created: got.Created,
		}, s.c.req.IncludeUsage)
		s.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		s.w.WriteHeader(http.StatusOK)
	}
	if got.Usage != nil {
		s.usage = *got.Usage
	}
	if len(got.Choices) == 0 {
		return nil
	}
	ch := got.Choices[0]
	text := append(s.c.owed, ch.Text...)
	first := s.c.owed != nil
	s.c.owed = nil
	var buf []byte
	if len(text) > 0 || len(ch.TokenIDs) > 0 {
		buf = s.chunks.AppendText(buf, 0, text, nil)
		if len(ch.TokenIDs) > 0 {
			buf = s.chunks.InsertTokens(buf, 0, ch.TokenIDs)
		}
		if first {
			buf = s.chunks.InsertKV(buf, 0, "replayed", 0, s.c.prompt+len(s.c.delivered.TokenIDs))
		}
	}
	if ch.FinishReason != nil {
		buf = s.chunks.AppendFinish(buf, 0, *ch.FinishReason)
	}
	return s.write(buf)
}

// end writes the usage and the last event.
func (s *stream) end() error {
	if s.chunks == nil {
		return s.broken(errors.New("the server's stream was empty"))
	}
	var buf []byte
	if s.c.req.IncludeUsage {
		u := s.usage
		u.PromptTokens = s.c.prompt
		u.CompletionTokens += len(s.c.delivered.TokenIDs)
		u.TotalTokens = u.PromptTokens + u.CompletionTokens
		buf = s.chunks.AppendUsage(buf, u)
	}
	_ = s.write(append(buf, openai.Done...)) // the client may be gone
	return nil
}

// broken ends a stream that the server did not end.
func (s *stream) broken(cause error) error {
	e := openai.Errorf(http.StatusBadGateway, "The server behind this worker broke off the answer.")
	if s.chunks == nil {
		e.Write(s.w)
		return cause
	}
	_ = s.write(e.Event()) // the client may be gone
	return cause
}

// write sends b at once.
func (s *stream) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if _, err := s.w.Write(b); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}
