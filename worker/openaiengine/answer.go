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
	"strconv"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
)

const (
	// mostAnswer bounds an answer that is no stream; it is read before it is passed on.
	mostAnswer = 64 << 20
	// mostError bounds what is read of an error, and mostWords what is told of one that
	// is not in OpenAI's shape.
	mostError, mostWords = 64 << 10, 1000
)

// errNoAnswer is the cause where a server's 200 holds no answer.
var errNoAnswer = errors.New("the server's answer is no JSON object")

// known reports whether a path is one whose requests and answers are OpenAI's or vLLM's,
// and therefore understood. All others pass as they are.
func known(path string) bool {
	switch path {
	case openai.EmbeddingsPath, openai.TokenizePath, openai.DetokenizePath:
		return true
	}
	_, generation := openai.EndpointOf(path)
	return generation
}

// worded makes the server's answer to a known path one of the worker's own: an error has
// OpenAI's shape, an answer the worker's name of the model, and what is no answer is a
// 502. It notes in cause what the client is told only in general. The error is that
// nobody is there to be told.
func (e *Engine) worded(resp *http.Response, cause *error) error {
	ctx := resp.Request.Context()
	switch {
	case resp.Request.Method != http.MethodPost:
	case resp.StatusCode >= 400:
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, mostError+1)) // what came of it tells enough
		if isError(raw) {
			replace(resp, resp.StatusCode, raw)
		} else {
			fail(resp, foreign(resp, raw))
		}
	case resp.StatusCode != http.StatusOK:
	case strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream"):
		resp.Body = &eventBody{from: resp.Body, events: openai.NewEventReader(resp.Body, most), ctx: ctx, model: e.model.Name, cause: cause}
		resp.Header.Del("Content-Length")
		resp.ContentLength = -1
	default:
		raw, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer+1))
		if err == nil && len(raw) > mostAnswer {
			err = fmt.Errorf("the server's answer is larger than %d bytes", mostAnswer)
		}
		if err == nil {
			if raw, err = openai.Renamed(raw, e.model.Name); err != nil {
				err = fmt.Errorf("%w: %w", errNoAnswer, err)
			}
		}
		if clientLeft(ctx) {
			return context.Canceled
		}
		if err != nil {
			*cause = err
			fail(resp, openai.Errorf(http.StatusBadGateway, "The server behind this worker gave no whole answer."))
			return nil
		}
		replace(resp, resp.StatusCode, raw)
	}
	return nil
}

// clientLeft tells a client that left from the worker's own end, which ends requests for
// another cause.
func clientLeft(ctx context.Context) bool { return errors.Is(context.Cause(ctx), context.Canceled) }

// isError reports whether a body is an error in OpenAI's shape. The message may be
// anything but missing: the members beside it are the server's own.
func isError(body []byte) bool {
	var e struct {
		Error struct{ Message string }
	}
	return json.Unmarshal(body, &e) == nil && e.Error.Message != ""
}

// foreign words an error of another shape: FastAPI's {"detail":…}, TGI's {"error":"…"},
// text, or a page for people, of which nothing is told.
func foreign(resp *http.Response, body []byte) *openai.Error {
	var said struct {
		Detail  json.RawMessage `json:"detail"`
		Error   json.RawMessage `json:"error"`
		Message json.RawMessage `json:"message"`
	}
	words := ""
	if json.Unmarshal(body, &said) == nil {
		for _, raw := range []json.RawMessage{said.Detail, said.Error, said.Message} {
			if words == "" && len(raw) > 0 && string(raw) != "null" {
				if json.Unmarshal(raw, &words) != nil {
					words = string(raw)
				}
			}
		}
	} else if text := bytes.TrimSpace(body); len(text) > 0 && text[0] != '<' && !strings.Contains(resp.Header.Get("Content-Type"), "html") {
		words = string(text)
	}
	e := openai.Errorf(resp.StatusCode, "The server behind this worker answered with status %d.", resp.StatusCode)
	if len(words) > mostWords {
		words = words[:mostWords]
	}
	if words = strings.ToValidUTF8(words, ""); strings.TrimSpace(words) != "" {
		e.Message = strings.TrimSuffix(e.Message, ".") + ": " + words
	}
	switch resp.StatusCode {
	case http.StatusServiceUnavailable:
		e.Code, e.RetryAfter = "service_unavailable", time.Second
	case http.StatusTooManyRequests:
		e.RetryAfter = time.Second
	}
	return e
}

// fail makes a response the error e. A time to wait that the server named stays.
func fail(resp *http.Response, e *openai.Error) {
	if s := e.RetryAfterSeconds(); s != "" && resp.Header.Get("Retry-After") == "" {
		resp.Header.Set("Retry-After", s)
	}
	replace(resp, e.Status, e.Body())
}

// replace gives a response another body, of JSON.
func replace(resp *http.Response, status int, body []byte) {
	_ = resp.Body.Close() // what is left of it is of no use
	resp.StatusCode, resp.Status = status, ""
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	resp.Header.Set("Content-Length", strconv.Itoa(len(body)))
	resp.Header.Del("Content-Encoding")
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		resp.Header.Set("Content-Type", "application/json")
	}
}

// eventBody is a server's stream with the worker's name of the model. One that ends
// without [DONE], or in what is no event of OpenAI's, ends with an error event.
type eventBody struct {
	ctx    context.Context // of the client's request
	from   io.ReadCloser
	events *openai.EventReader
	model  string
	cause  *error // of the end, nil for a whole stream or one that ended in the server's error

	unread []byte
	failed bool // the server told an error
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
	switch {
	case err != nil && b.failed:
		b.over = true
	case err != nil:
		b.broken(fmt.Errorf("the server's stream broke off: %w", err))
	case ev.Done():
		b.unread, b.over = ev.Raw, true
	case ev.Data == nil, ev.Name != nil, len(ev.Data) == 0:
		b.unread = ev.Raw
	default:
		data, err := openai.Renamed(ev.Data, b.model)
		if err != nil {
			b.broken(fmt.Errorf("the server's stream ended in what is no event of it: %w", err))
			return
		}
		b.failed = b.failed || isError(data)
		b.unread = ev.Raw
		if &data[0] != &ev.Data[0] {
			b.unread = slices.Concat([]byte("data: "), data, []byte("\n\n"))
		}
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
