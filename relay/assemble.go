package relay

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// assembler makes a whole answer out of the events of a stream, for clients that asked
// for none: so it can go on elsewhere like any stream. It belongs to whoever holds the
// job's pen.
type assembler struct {
	header  http.Header // of the first worker
	head    openai.Chunk
	choices []assembled // by index
	usage   *openai.Usage
	size    int64
}

// assembled is one choice.
type assembled struct {
	text   []byte // no strings.Builder: choices are copied as their list grows
	calls  []openai.ToolCall
	chat   *openai.ChatLogprobs
	probs  *openai.TextLogprobs
	finish *string
}

// piece is an event as the assembler reads it.
type piece struct {
	openai.Chunk
	Choices []struct {
		openai.ChunkChoice
		Logprobs json.RawMessage `json:"logprobs"`
	} `json:"choices"`
}

// add takes the data of an event.
func (w *assembler) add(data []byte, chat bool) error {
	var p piece
	if err := json.Unmarshal(data, &p); err != nil {
		return fmt.Errorf("event of a worker: %w", err)
	}
	if w.head.ID == "" {
		w.head = p.Chunk
	}
	if p.Usage != nil {
		w.usage = p.Usage
	}
	w.size += int64(len(data))
	for _, c := range p.Choices {
		if c.Index < 0 || c.Index >= mostChoices {
			return fmt.Errorf("event of a worker: choice %d is none", c.Index)
		}
		for c.Index >= len(w.choices) {
			w.choices = append(w.choices, assembled{})
		}
		to := &w.choices[c.Index]
		to.text = append(to.text, c.Added()...)
		if c.Delta != nil {
			if err := to.call(c.Delta.ToolCalls); err != nil {
				return err
			}
		}
		if c.FinishReason != nil {
			to.finish = c.FinishReason
		}
		if err := to.addProbs(c.Logprobs, chat); err != nil {
			return fmt.Errorf("logprobs of a worker: %w", err)
		}
	}
	return nil
}

// call adds pieces of tool calls.
func (c *assembled) call(deltas []openai.ToolCallDelta) error {
	for _, d := range deltas {
		if d.Index < 0 || d.Index >= mostChoices {
			return fmt.Errorf("event of a worker: call %d is none", d.Index)
		}
		for d.Index >= len(c.calls) {
			c.calls = append(c.calls, openai.ToolCall{})
		}
		to := &c.calls[d.Index]
		if d.ID != "" {
			to.ID, to.Type, to.Function.Name = d.ID, d.Type, d.Function.Name
		}
		to.Function.Arguments += d.Function.Arguments
	}
	return nil
}

// addProbs adds log-probabilities in the form of the endpoint.
func (c *assembled) addProbs(raw json.RawMessage, chat bool) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	if chat {
		var p openai.ChatLogprobs
		if err := json.Unmarshal(raw, &p); err != nil {
			return err
		}
		if c.chat == nil {
			c.chat = &openai.ChatLogprobs{}
		}
		c.chat.Content = append(c.chat.Content, p.Content...)
		return nil
	}
	var p openai.TextLogprobs
	if err := json.Unmarshal(raw, &p); err != nil {
		return err
	}
	if c.probs == nil {
		c.probs = &openai.TextLogprobs{}
	}
	c.probs.Tokens = append(c.probs.Tokens, p.Tokens...)
	c.probs.TokenLogprobs = append(c.probs.TokenLogprobs, p.TokenLogprobs...)
	c.probs.TopLogprobs = append(c.probs.TopLogprobs, p.TopLogprobs...)
	c.probs.TextOffset = append(c.probs.TextOffset, p.TextOffset...)
	return nil
}

// answer words the whole answer.
func (w *assembler) answer(chat bool) any {
	h := w.head
	if chat {
		out := openai.ChatCompletion{ID: h.ID, Object: "chat.completion", Created: h.Created, Model: h.Model, SystemFingerprint: h.SystemFingerprint, Usage: w.usage}
		for i := range w.choices {
			c := &w.choices[i]
			out.Choices = append(out.Choices, openai.ChatChoice{
				Index: i, Message: openai.ChatMessage{Role: "assistant", Content: string(c.text), ToolCalls: c.calls},
				Logprobs: c.chat, FinishReason: c.finish,
			})
		}
		return out
	}
	out := openai.Completion{ID: h.ID, Object: "text_completion", Created: h.Created, Model: h.Model, SystemFingerprint: h.SystemFingerprint, Usage: w.usage}
	for i := range w.choices {
		c := &w.choices[i]
		out.Choices = append(out.Choices, openai.TextChoice{Text: string(c.text), Index: i, Logprobs: c.probs, FinishReason: c.finish})
	}
	return out
}

// collect adds an event to a whole answer. The pen is held.
func (a *attempt) collect(data []byte) (outcome, bool) {
	j := a.j
	if err := j.whole.add(data, j.endpoint == openai.Chat); err != nil {
		return a.broken(broke()), true
	}
	if j.whole.size > j.r.cfg.MaxAnswer {
		j.led.loose = "it is too large"
		return outcome{result: resultBroken, err: tooLargeAnswer(j.r.cfg.MaxAnswer)}, true
	}
	j.state.events.Add(1)
	return outcome{}, false
}

// write sends the whole answer.
func (w *assembler) write(j *job, worker string) error {
	body, err := json.Marshal(w.answer(j.endpoint == openai.Chat))
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	h := answerHeader(w.header, worker)
	for _, name := range []string{"Cache-Control", "X-Accel-Buffering"} {
		h.Del(name)
	}
	h.Set("Content-Type", "application/json")
	return j.out.whole(http.StatusOK, h, slices.Concat(body, []byte{'\n'}))
}
