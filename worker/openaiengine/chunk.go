package openaiengine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// chunk is one event of the server's stream, of either endpoint.
type chunk struct {
	ID      string        `json:"id"`
	Created int64         `json:"created"`
	Choices []chunkChoice `json:"choices"`
	Usage   *openai.Usage `json:"usage"`
}

// chunkChoice is what an event says of a choice.
type chunkChoice struct {
	Text         string                     `json:"text"` // of a delta, too
	Delta        map[string]json.RawMessage `json:"delta"`
	TokenIDs     []int32                    `json:"token_ids"`
	FinishReason *string                    `json:"finish_reason"`
}

// errMore is the cause where a continuation says what is no text.
var errMore = errors.New("the server says more than text")

// readChunk reads an event. The error says that it is none, or none that a stream of text
// can go on with.
func readChunk(data []byte) (chunk, error) {
	var got chunk
	if err := json.Unmarshal(data, &got); err != nil {
		return got, err
	}
	for i := range got.Choices {
		c := &got.Choices[i]
		for name, raw := range c.Delta {
			switch v := string(raw); {
			case name == "content" && v != "null":
				if err := json.Unmarshal(raw, &c.Text); err != nil {
					return got, err
				}
			case name != "role" && v != "null" && v != `""` && v != "[]":
				return got, fmt.Errorf("%w: a delta with the member %.64q", errMore, name)
			}
		}
		if c.FinishReason == nil {
			continue
		}
		said := *c.FinishReason
		if openai.Dropped(said) {
			return got, fmt.Errorf("%w: finish_reason %q", errGaveUp, said)
		}
		if c.FinishReason = new(finishReason(said)); said == "" {
			c.FinishReason = nil
		}
	}
	return got, nil
}

// mostEvent bounds one event of the server.
const mostEvent = 4 << 20

// relay writes the server's stream in the form of the request's endpoint, as if it
// had been one from the start: the text that was held back first, and the usage of all of it.
func (c *continuation) relay(w http.ResponseWriter, from io.Reader, model string) error {
	events := openai.NewEventReader(from, mostEvent)
	out := newStream(w, c, model)
	for {
		ev, err := events.Next()
		if err != nil {
			return out.broken(fmt.Errorf("the server's stream broke off: %w", err))
		}
		if ev.Done() {
			return out.end()
		}
		if _, failed := errorOf(ev); failed {
			return out.broken(fmt.Errorf("the server's stream ended in %.200q", ev.Raw))
		}
		if len(ev.Data) == 0 || !unnamed(ev) { // a comment, as servers and proxies send to keep a connection, or what is no part of the answer
			continue
		}
		got, err := readChunk(ev.Data)
		if err != nil {
			return out.broken(fmt.Errorf("the server's stream ended in what it cannot go on with: %w", err))
		}
		out.count(&got)
		if !out.repeats(&got) {
			refuse("the server says other tokens than the delivered ones of a character's part").Write(w)
			return nil
		}
		if len(c.again) > 0 && len(got.Choices) > 0 {
			continue
		}
		if err := out.add(got); err != nil {
			return nil // the client left
		}
		if out.stopped {
			return out.end() // the server, which did not see the stop string, is left
		}
	}
}
