package openaiengine

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
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

// continuation is a stream that goes on from what was delivered: by token ids, through
// the completions endpoint whatever the stream's own, or by text, through its own.
type continuation struct {
	req       *openai.Request
	delivered worker.Delivered
	path      string  // of the server's endpoint
	mode      string  // how it goes on, for the relay
	prompt    int     // tokens of the prompt alone
	given     int     // delivered tokens
	text      []byte  // of the delivered tokens: what the client has, and what was held back
	free      int     // bytes of text in which a stop string may end and does not count
	again     []int32 // delivered tokens of a character's part, which the server has to say again
	body      []byte  // for the server; nil = the answer has all its tokens
}

// stops is what looks for stop strings in the answer from its beginning: one may begin in
// text that the client has.
func (c *continuation) stops() *worker.Text {
	t := worker.NewText(c.req.Stop)
	t.Ignore(c.free)
	return t
}

// stopped reports whether a stop string has ended the answer already.
func (c *continuation) stopped() bool {
	_, yes := c.stops().Push(c.text)
	return yes
}

// spare sets the bytes in which no stop string counts: those of the first 'min_tokens'
// tokens, which early says, and those that the client has, as the stream went on behind
// them. But one that is told and ends them may be the end itself.
func (c *continuation) spare(early int) {
	has := c.delivered.TextBytes
	if includesStop(c.req) {
		has--
	}
	c.free = max(early, has, 0)
}

// resume continues a stream.
func (e *Engine) resume(w http.ResponseWriter, r *http.Request, f *worker.Forwarded) error {
	c, err := e.continuation(r.Context(), f)
	if bad, ok := errors.AsType[*openai.Error](err); ok {
		bad.Write(w)
		return nil
	}
	if err == nil && c.body == nil {
		return c.over(w, e.model.Name)
	}
	var resp *http.Response
	if err == nil {
		resp, err = e.post(r.Context(), c.path, c.body)
	}
	if err != nil {
		openai.Unavailable(0, "The server behind this worker did not continue the stream.").Write(w)
		return err
	}
	defer resp.Body.Close()
	return c.relay(w, resp.Body, e.model.Name)
}

// refuse says why a stream cannot go on here.
func refuse(why string) *openai.Error {
	return openai.Invalid("kvmesh.resume", "This engine cannot continue the stream: %s.", why)
}

// continuation prepares the server's request. Errors of the type *openai.Error say
// why the stream cannot go on here.
func (e *Engine) continuation(ctx context.Context, f *worker.Forwarded) (*continuation, error) {
	e.mu.Lock()
	kind := e.kind
	e.mu.Unlock()
	how := way{kind: kind, endpoint: f.Endpoint}
	switch {
	case f.N != 1 || len(f.Delivered) != 1 || f.Delivered[0].Index != 0 || !f.Stream:
		return nil, refuse("only streams of one choice can be continued")
	case len(f.Delivered[0].TokenIDs) == 0 && f.Delivered[0].Text != "":
		how.byText = true
	case kind != VLLM:
		return nil, refuse("the server takes or gives no token ids")
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(f.Rewritten(e.name, 0), &fields); err != nil {
		return nil, err
	}
	if err := how.check(fields); err != nil {
		return nil, err
	}
	delete(fields, "request_id") // it is the first request's, which the server may still have
	if how.byText {
		return e.byText(ctx, kind, f, fields)
	}
	return e.byIDs(ctx, f, fields)
}

// byIDs prepares a continuation from the ids of the prompt and those delivered.
func (e *Engine) byIDs(ctx context.Context, f *worker.Forwarded, fields map[string]json.RawMessage) (*continuation, error) {
	c := &continuation{req: f.Request, delivered: f.Delivered[0], path: string(openai.Completions), mode: "replayed"}
	prompt, err := e.promptIDs(ctx, f.Request)
	if err != nil {
		return nil, err
	}
	c.prompt = len(prompt)
	// The server's text begins with a whole character, so tokens of a part are left to it.
	for c.given = len(c.delivered.TokenIDs); c.text == nil; c.given-- {
		if c.given < 0 || len(c.delivered.TokenIDs)-c.given > utf8.UTFMax {
			return nil, refuse("its tokens end in what is no text")
		}
		if c.text, err = e.textOf(ctx, c.delivered.TokenIDs[:c.given], c.delivered.TextBytes); err != nil {
			return nil, err
		}
		if c.text != nil {
			break
		}
	}
	c.again = c.delivered.TokenIDs[c.given:]
	least, err := c.least(fields)
	if err != nil {
		return nil, err
	}
	early := 0
	if least > 0 && len(f.Stop) > 0 {
		said, err := e.detokenize(ctx, c.delivered.TokenIDs[:least])
		if err != nil {
			return nil, err
		}
		early = len(strings.TrimRight(said, string(utf8.RuneError))) // without a character's part
	}
	c.spare(early)
	if c.stopped() {
		return c, nil // without a body
	}
	if !c.heldBack() {
		return nil, refuse("the server told less text than its tokens have, as where it keeps reasoning apart")
	}
	// Stop strings are looked for here, as one may have begun before the cut; and a server
	// that looks for them too tells its text later than its ids.
	delete(fields, "stop")
	deleteChat(fields)
	fields["return_token_ids"] = []byte("true")
	if fields["prompt"], err = json.Marshal(slices.Concat(prompt, c.delivered.TokenIDs[:c.given])); err != nil {
		return nil, err
	}
	return c, c.finish(e, fields)
}

// heldBack reports whether all text that the client has not can be such as a server holds
// back until it knows whether it begins a stop string. Text that is missing for another
// reason would be told now: a reasoning or tool parser took it, or it is a special token's.
func (c *continuation) heldBack() bool {
	longest := 1
	for _, s := range c.req.Stop {
		longest = max(longest, utf8.RuneCountInString(s))
	}
	if includesStop(c.req) {
		longest = 1
	}
	return utf8.RuneCount(c.text[min(c.delivered.TextBytes, len(c.text)):]) < longest
}

// deleteChat removes the fields of chat that a completion has not; what they say is in its
// prompt, or they say nothing (see neutral).
func deleteChat(fields map[string]json.RawMessage) {
	for _, name := range append(promptFields(openai.Chat), "top_logprobs", "logprobs", "tools", "tool_choice", "functions", "function_call",
		"parallel_tool_calls", "response_format", "modalities", "documents", "include_reasoning") {
		delete(fields, name)
	}
}

// promptFields are the fields that make the prompt, as vLLM's /tokenize takes them, too.
func promptFields(ep openai.Endpoint) []string {
	if ep == openai.Completions {
		return []string{"prompt", "add_special_tokens"}
	}
	return []string{"messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs"}
}

// least is the request's 'min_tokens'.
func (c *continuation) least(fields map[string]json.RawMessage) (int, error) {
	var least int
	if raw, ok := fields["min_tokens"]; ok {
		_ = json.Unmarshal(raw, &least) // what is no number has no effect here
	}
	if len(c.req.Stop) > 0 && least > c.given {
		return 0, refuse("up to 'min_tokens' stop strings do not count, and only the server knows where that is")
	}
	return least, nil
}

// finish makes the body of the server's request, which asks for the rest of the tokens.
func (c *continuation) finish(e *Engine, fields map[string]json.RawMessage) error {
	left := 0 // no limit of its own
	switch {
	case c.req.MaxTokens > 0:
		left = c.req.MaxTokens - c.given
	case c.req.Endpoint == openai.Completions:
		left = completionTokens - c.given
	case e.model.ContextLen > 0:
		left = e.model.ContextLen - c.prompt - c.given
	}
	if left < 0 || left == 0 && (c.req.MaxTokens > 0 || c.req.Endpoint == openai.Completions || e.model.ContextLen > 0) {
		return nil // without a body
	}
	delete(fields, "max_completion_tokens")
	delete(fields, "max_tokens")
	if left > 0 {
		fields["max_tokens"] = []byte(strconv.Itoa(left))
	}
	fields["stream_options"] = []byte(`{"include_usage":true}`)
	least, err := c.least(fields)
	if err != nil {
		return err
	}
	delete(fields, "min_tokens")
	if least > c.given {
		fields["min_tokens"] = []byte(strconv.Itoa(least - c.given))
	}
	c.body, err = json.Marshal(fields)
	return err
}

// completionTokens is the default max_tokens of the completions endpoint.
const completionTokens = 16

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
	}
	for _, name := range promptFields(req.Endpoint) {
		if raw := req.Raw(name); raw != nil {
			ask[name] = raw
		}
	}
	ask["model"], _ = json.Marshal(e.name) // a string always marshals
	var answer openai.Tokenized
	if err := e.ask(ctx, openai.TokenizePath, ask, &answer); err != nil {
		return nil, err
	}
	return answer.Tokens, nil
}

// includesStop reports whether the stop string that ends the answer is told, as vLLM does
// when asked.
func includesStop(req *openai.Request) bool {
	return string(req.Raw("include_stop_str_in_output")) == "true"
}

// textOf is the text of delivered tokens, of which the client has the given bytes. It is
// nil when the tokens end inside of a character.
func (e *Engine) textOf(ctx context.Context, ids []int32, delivered int) ([]byte, error) {
	if len(ids) == 0 && delivered == 0 {
		return []byte{}, nil
	}
	text, err := e.detokenize(ctx, ids)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(text, string(utf8.RuneError)) {
		return nil, nil
	}
	if delivered > len(text) {
		return nil, openai.Invalid("kvmesh.resume", "Invalid 'kvmesh.resume': %d bytes of text were delivered, the tokens have %d.", delivered, len(text))
	}
	return []byte(text), nil
}

// detokenize has the server turn ids into text.
func (e *Engine) detokenize(ctx context.Context, ids []int32) (string, error) {
	var answer openai.Detokenized
	err := e.ask(ctx, openai.DetokenizePath, map[string]any{"model": e.name, "tokens": ids}, &answer)
	return answer.Prompt, err
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

// over ends an answer that has all its tokens.
func (c *continuation) over(w http.ResponseWriter, model string) error {
	out := newStream(w, c, model)
	got := chunk{ID: "cmpl-" + rand.Text(), Created: time.Now().Unix(), Choices: make([]chunkChoice, 1)}
	got.Choices[0].FinishReason = new("length") // but for a stop string
	if err := out.add(got); err != nil {
		return nil // the client left
	}
	return out.end()
}
