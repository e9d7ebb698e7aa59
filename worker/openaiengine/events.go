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

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// eventBody is a server's stream with the worker's name of the model. It ends with
// [DONE], with the server's error event, or, where the server broke it off or said what
// is no event of OpenAI's, with one of the worker's.
type eventBody struct {
	ctx    context.Context // of the client's request
	from   io.ReadCloser
	events *openai.EventReader
	model  string
	cause  *error // of the end, nil for a whole stream or one that ended in the server's error

	unread []byte
	over   bool
}

// Read implements io.Reader. It returns as soon as there is an event.
func (b *eventBody) Read(p []byte) (int, error) {
	for len(b.unread) == 0 {
		if b.over && clientLeft(b.ctx) {
			return 0, context.Canceled // the answer is cut, not ended
		}
		if b.over {
			return 0, io.EOF
		}
		b.next()
	}
	n := copy(p, b.unread)
	b.unread = b.unread[n:]
	return n, nil
}

// next takes one event.
func (b *eventBody) next() {
	ev, err := b.events.Next()
	if err != nil {
		b.broken(fmt.Errorf("the server's stream broke off: %w", err))
		return
	}
	if said, failed := errorOf(ev); failed {
		b.unread, b.over = said, true
		return
	}
	if ev.Done() {
		b.unread, b.over = []byte(openai.Done), true
		return
	}
	if b.unread = ev.Raw; len(ev.Data) == 0 {
		return
	}
	data, err := reworded(ev.Data, b.model)
	switch {
	case err != nil && !unnamed(ev) && !errors.Is(err, errGaveUp): // the server's own
	case err != nil:
		b.broken(fmt.Errorf("the server's stream ended in what is no event of it: %w", err))
	case bytes.IndexByte(data, '\n') >= 0 || &data[0] != &ev.Data[0]:
		b.unread = withData(ev, data)
	}
}

// broken ends the stream.
func (b *eventBody) broken(cause error) {
	if b.over = true; clientLeft(b.ctx) {
		return
	}
	*b.cause = cause
	b.unread = openai.Errorf(http.StatusBadGateway, "The server behind this worker broke off the answer.").Event()
}

// Close implements io.Closer.
func (b *eventBody) Close() error { return b.from.Close() }

// unnamed reports whether an event is of the kind that all events of OpenAI's streams are:
// "message" is the name of those without one.
func unnamed(ev openai.Event) bool { return len(ev.Name) == 0 || string(ev.Name) == "message" }

// withData is an event with other data, which is JSON, and its other fields as they are.
// The data is on one line: many clients read an event by its first.
func withData(ev openai.Event, data []byte) []byte {
	if bytes.IndexByte(data, '\n') >= 0 {
		line := jsontext.Value(bytes.Clone(data))
		_ = line.Compact(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)) // it was read as JSON
		data = line
	}
	var out []byte
	for line := range bytes.FieldsFuncSeq(ev.Raw, func(r rune) bool { return r == '\n' || r == '\r' }) {
		if name, _, _ := bytes.Cut(line, []byte{':'}); string(name) != "data" {
			out = append(append(out, line...), '\n')
		}
	}
	return slices.Concat(out, []byte("data: "), data, []byte("\n\n"))
}

// errGaveUp is the cause where the server's finish_reason is that it gave the answer up.
var errGaveUp = errors.New("the server gave the answer up")

// reworded is an answer, or an event of one, with the worker's name of the model and
// OpenAI's words for the ends that it knows. The error says that it is none, or that the server gave it up.
func reworded(data []byte, model string) ([]byte, error) {
	data, err := openai.Renamed(data, model)
	if err != nil {
		return nil, err
	}
	var said struct {
		Choices []struct {
			FinishReason string `json:"finish_reason"`
		} `json:"choices"`
	}
	if bytes.Contains(data, []byte(`"finish_reason"`)) {
		_ = json.Unmarshal(data, &said) // what is of another type is the client's to judge
	}
	for _, c := range said.Choices {
		if openai.Dropped(c.FinishReason) {
			return nil, fmt.Errorf("%w: finish_reason %q", errGaveUp, c.FinishReason)
		}
		if finishReason(c.FinishReason) != c.FinishReason {
			data = withReasons(data)
			break
		}
	}
	return data, nil
}

// finishReason is OpenAI's word for a server's: TGI has its own for two ends of a text.
// One that is not known is a client's to read.
func finishReason(said string) string {
	switch said {
	case "eos_token", "stop_sequence":
		return "stop"
	}
	return said
}

// withReasons puts OpenAI's finish_reasons in the place of the server's.
func withReasons(data []byte) []byte {
	var out []byte
	at := 0
	d := jsontext.NewDecoder(bytes.NewBuffer(data), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	for {
		tok, err := d.ReadToken()
		if err != nil { // the end: it was read before
			return append(out, data[at:]...)
		}
		if tok.Kind() != '"' || d.StackDepth() != 3 {
			continue
		}
		said := tok.String()
		kind, n := d.StackIndex(3)
		if p := string(d.StackPointer()); kind != '{' || n%2 != 0 || !strings.HasPrefix(p, "/choices/") || d.StackPointer().LastToken() != "finish_reason" || finishReason(said) == said {
			continue
		}
		end := int(d.InputOffset())
		from := bytes.LastIndexByte(data[:end-1], '"') + 1 // no reason that is replaced has a quote
		out = append(append(out, data[at:from]...), finishReason(said)...)
		at = end - 1
	}
}

// errorOf returns the event that tells a client of an error, where the server's event is
// one: with a member error, be it a string as TGI's; named error; of vLLM's older form,
// which has no member error; or in the field error, as llama-server had it.
func errorOf(ev openai.Event) (event []byte, failed bool) {
	data := ev.Data
	if line, ok := bytes.CutPrefix(ev.Raw, []byte("error:")); ok && data == nil {
		data, ev.Name = bytes.TrimSpace(line), []byte("error")
	}
	named := string(ev.Name) == "error"
	if !named && !bytes.Contains(data, []byte(`"error"`)) {
		return nil, false
	}
	var said struct {
		Object  string          `json:"object"`
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	err := json.Unmarshal(data, &said)
	told := len(said.Error) > 0 && string(said.Error) != "null"
	flat := !told && said.Message != "" && (named || said.Object == "error")
	if !named && !told && !flat {
		return nil, false
	}
	if line := jsontext.Value(bytes.Clone(data)); err == nil && line.Compact() == nil {
		if flat {
			line = slices.Concat([]byte(`{"error":`), line, []byte{'}'})
		}
		if isError(line) {
			return slices.Concat([]byte("data: "), line, []byte("\n\n")), true
		}
	}
	e := openai.Errorf(http.StatusBadGateway, "The server behind this worker ended the answer with an error.")
	e.Message = withWords(e.Message, data)
	return e.Event(), true
}
