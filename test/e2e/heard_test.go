package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// heard is what a client was told in one streamed answer.
type heard struct {
	ids     []string // of events
	text    map[int]string
	args    map[int]string // of tool calls, joined
	finish  map[int]string
	usage   *openai.Usage
	head    map[string]bool // id, created, model and fingerprint of the events
	worker  string          // of the first byte
	done    bool
	failure string // error event
	events  int
	longest time.Duration // between two events

	wantsIDs bool
	tokens   []int32 // token ids of choice 0, where they were asked for
}

// ask is one request of a client.
type ask struct {
	path    string // behind /v1
	body    string
	session string // keeps it with one worker
	ids     bool   // the client wants token ids
}

// streamed asks for a streamed answer on the mesh and reads it to its end; each is
// called once after each event that carries tokens, not after an error or the end.
func streamed(ctx context.Context, m *testmesh.Mesh, a ask, each func(h *heard)) (*heard, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.OpenAI+a.path, strings.NewReader(a.body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if a.session != "" {
		req.Header.Set("x-session-id", a.session)
	}
	h := newHeard()
	h.wantsIDs = a.ids
	return h, h.hear(http.DefaultClient, req, each)
}

func newHeard() *heard {
	return &heard{text: map[int]string{}, args: map[int]string{}, finish: map[int]string{}, head: map[string]bool{}}
}

// hear reads the answer to a request, or the rest of one, to its end.
func (t *heard) hear(c *http.Client, req *http.Request, each func(h *heard)) error {
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	t.worker = resp.Header.Get("x-kvmesh-worker")
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	last := time.Now()
	for lines.Scan() {
		if id, ok := strings.CutPrefix(lines.Text(), "id: "); ok {
			t.ids = append(t.ids, id)
		}
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		t.longest = max(t.longest, time.Since(last))
		last = time.Now()
		before := t.events
		if err := t.take(data); err != nil {
			return err
		}
		if each != nil && t.events > before {
			each(t)
		}
	}
	return lines.Err()
}

// stream is the id of the stream.
func (t *heard) stream() string {
	if len(t.ids) == 0 {
		return ""
	}
	id, _, _ := strings.Cut(t.ids[0], ":")
	return id
}

// take reads the data of one event.
func (t *heard) take(data string) error {
	if data == openai.DoneData {
		if t.done {
			return errors.New("[DONE] twice")
		}
		t.done = true
		return nil
	}
	if t.done {
		return fmt.Errorf("after [DONE]: %s", data)
	}
	if !t.wantsIDs && strings.Contains(data, "token_ids") || strings.Contains(data, `"kvmesh"`) {
		return fmt.Errorf("what is the mesh's own reached the client: %s", data)
	}
	var c struct {
		openai.Chunk
		Error json.RawMessage `json:"error"`
	}
	var ids struct {
		Choices []struct {
			TokenIDs []int32 `json:"token_ids"`
		} `json:"choices"`
	}
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		return fmt.Errorf("event %s: %w", data, err)
	}
	if t.wantsIDs && json.Unmarshal([]byte(data), &ids) == nil && len(ids.Choices) == 1 {
		t.tokens = append(t.tokens, ids.Choices[0].TokenIDs...)
	}
	if c.Error != nil {
		t.failure = string(c.Error)
		return nil
	}
	t.events++
	t.head[fmt.Sprint(c.ID, c.Created, c.Model, c.SystemFingerprint)] = true
	if c.Usage != nil {
		if t.usage != nil {
			return errors.New("usage twice")
		}
		t.usage = c.Usage
	}
	for _, ch := range c.Choices {
		if t.finish[ch.Index] != "" {
			return fmt.Errorf("choice %d goes on after its end: %s", ch.Index, data)
		}
		t.text[ch.Index] += ch.Added()
		if ch.Delta != nil {
			for _, call := range ch.Delta.ToolCalls {
				t.args[ch.Index] += call.ID + call.Function.Name + call.Function.Arguments
			}
		}
		if ch.FinishReason != nil {
			t.finish[ch.Index] = *ch.FinishReason
		}
	}
	return nil
}

// same says how an answer differs from the undisturbed one, "" when it does not.
func (t *heard) same(want *heard) string {
	switch {
	case t.failure != "":
		return "it ended in " + t.failure
	case !t.done:
		return "no [DONE]"
	case fmt.Sprint(t.text) != fmt.Sprint(want.text):
		return fmt.Sprintf("text\n%v, want\n%v", t.text, want.text)
	case fmt.Sprint(t.tokens) != fmt.Sprint(want.tokens):
		return fmt.Sprintf("tokens\n%v, want\n%v", t.tokens, want.tokens)
	case fmt.Sprint(t.args) != fmt.Sprint(want.args):
		return fmt.Sprintf("calls\n%v, want\n%v", t.args, want.args)
	case fmt.Sprint(t.finish) != fmt.Sprint(want.finish):
		return fmt.Sprintf("finish %v, want %v", t.finish, want.finish)
	case len(t.head) != 1:
		return fmt.Sprintf("events of %d answers: %v", len(t.head), t.head)
	case (t.usage == nil) != (want.usage == nil):
		return fmt.Sprintf("usage %v, want %v", t.usage, want.usage)
	case t.usage != nil && (t.usage.PromptTokens != want.usage.PromptTokens || t.usage.CompletionTokens != want.usage.CompletionTokens || t.usage.TotalTokens != want.usage.TotalTokens):
		return fmt.Sprintf("usage %+v, want %+v", *t.usage, *want.usage)
	}
	for i, id := range t.ids {
		if name, n, _ := strings.Cut(id, ":"); name == "" || n != fmt.Sprint(i+1) {
			return fmt.Sprintf("event %d has the id %q", i+1, id)
		}
	}
	return ""
}
