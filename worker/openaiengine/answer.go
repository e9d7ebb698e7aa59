package openaiengine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
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
var errNoAnswer = errors.New("the server's answer is none")

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
	case hasType(resp.Header, "text/event-stream"):
		resp.Body = &eventBody{from: resp.Body, events: openai.NewEventReader(resp.Body, most), ctx: ctx, model: e.model.Name, cause: cause}
		resp.Header.Del("Content-Length")
		resp.ContentLength = -1
	default:
		raw, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer+1))
		if err == nil && len(raw) > mostAnswer {
			err = fmt.Errorf("the server's answer is larger than %d bytes", mostAnswer)
		}
		if err == nil {
			if raw, err = reworded(raw, e.model.Name); err != nil {
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

// hasType looks at a content type, in which case is nothing.
func hasType(h http.Header, want string) bool {
	got, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(got), want)
}

// foreign words an error of another shape: FastAPI's {"detail":…}, TGI's {"error":"…"},
// text, or a page for people, of which nothing is told.
func foreign(resp *http.Response, body []byte) *openai.Error {
	if strings.Contains(strings.ToLower(resp.Header.Get("Content-Type")), "html") {
		body = nil
	}
	e := openai.Errorf(resp.StatusCode, "The server behind this worker answered with status %d.", resp.StatusCode)
	e.Message = withWords(e.Message, body)
	switch resp.StatusCode {
	case http.StatusServiceUnavailable:
		e.Code, e.RetryAfter = "service_unavailable", time.Second
	case http.StatusTooManyRequests:
		e.RetryAfter = time.Second
	}
	return e
}

// withWords adds to a sentence what a server said of its error, in whatever shape.
func withWords(sentence string, body []byte) string {
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
	} else if text := bytes.TrimSpace(body); len(text) > 0 && text[0] != '<' {
		words = string(text)
	}
	if len(words) > mostWords {
		words = words[:mostWords]
	}
	if words = strings.ToValidUTF8(words, ""); strings.TrimSpace(words) == "" {
		return sentence
	}
	return strings.TrimSuffix(sentence, ".") + ": " + words
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
	if !hasType(resp.Header, "application/json") {
		resp.Header.Set("Content-Type", "application/json")
	}
}
