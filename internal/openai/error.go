package openai

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Error is OpenAI's error object with the HTTP status it travels under. It is
// immutable after it was made.
type Error struct {
	Status     int           // HTTP status
	Type       string        // e.g. invalid_request_error
	Code       string        // e.g. model_not_found, "" = null
	Param      string        // the field at fault, "" = null
	Message    string        // for people
	RetryAfter time.Duration // sent as Retry-After in whole seconds when > 0
}

// Error returns the message with its status.
func (e *Error) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Type, e.Message) }

// TypeForStatus maps an HTTP status to OpenAI's error type.
func TypeForStatus(status int) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status == http.StatusServiceUnavailable:
		return "overloaded_error"
	case status >= 400 && status < 500:
		return "invalid_request_error"
	}
	return "api_error"
}

// Errorf makes an Error of the given status with the type that belongs to it.
func Errorf(status int, format string, args ...any) *Error {
	return &Error{Status: status, Type: TypeForStatus(status), Message: fmt.Sprintf(format, args...)}
}

// Invalid makes a 400 for one field of the request.
func Invalid(param, format string, args ...any) *Error {
	e := Errorf(http.StatusBadRequest, format, args...)
	e.Param = param
	return e
}

// Reserved is the answer to a body with ReservedField that does not come from the
// mesh's relay.
func Reserved() *Error {
	e := Errorf(http.StatusForbidden, "The field '%s' is the mesh's own; a request with it must come from its relay.", ReservedField)
	e.Param = ReservedField
	return e
}

// NotFoundModel is the answer to a model name that no route serves.
func NotFoundModel(model string) *Error {
	e := Errorf(http.StatusNotFound, "The model %q does not exist or you do not have access to it.", clip(model))
	e.Code, e.Param = "model_not_found", "model"
	return e
}

// ContextTooLong is the answer to a prompt that does not fit the context.
func ContextTooLong(param string, got, limit int) *Error {
	e := Invalid(param, "This model's maximum context length is %d tokens. However, your prompt has %d tokens. Please shorten it.", limit, got)
	e.Code = "context_length_exceeded"
	return e
}

// Unavailable is a 503 with Retry-After.
func Unavailable(retry time.Duration, format string, args ...any) *Error {
	e := Errorf(http.StatusServiceUnavailable, format, args...)
	e.Code, e.RetryAfter = "service_unavailable", retry
	return e
}

// MethodNotAllowed is a 405 that names the right method.
func MethodNotAllowed(method, path, want string) *Error {
	return Errorf(http.StatusMethodNotAllowed, "Not allowed to %s on %s. Use %s.", method, clip(path), want)
}

type errorBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// Body returns the JSON of {"error":{…}}, without a trailing newline.
func (e *Error) Body() []byte {
	b := errorBody{Message: e.Message, Type: e.Type}
	if e.Param != "" {
		b.Param = &e.Param
	}
	if e.Code != "" {
		b.Code = &e.Code
	}
	out, err := json.Marshal(map[string]errorBody{"error": b})
	if err != nil { // strings always marshal; invalid UTF-8 is replaced
		return []byte(`{"error":{"message":"internal error","type":"api_error","param":null,"code":null}}`)
	}
	return out
}

// Event returns the error as one server-sent event, as it ends a broken stream:
// nothing follows it, no [DONE].
func (e *Error) Event() []byte {
	return append(append([]byte("data: "), e.Body()...), "\n\n"...)
}

// Write sends the error as a whole HTTP response.
func (e *Error) Write(w http.ResponseWriter) {
	body := e.Body()
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if s := e.RetryAfterSeconds(); s != "" {
		h.Set("Retry-After", s)
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(body) // the client may be gone; nobody is left to tell
}

// RetryAfterSeconds is the value of Retry-After, rounded up, "" when there is none.
func (e *Error) RetryAfterSeconds() string {
	if e.RetryAfter <= 0 {
		return ""
	}
	return strconv.Itoa(int((e.RetryAfter + time.Second - 1) / time.Second))
}

// clip keeps client text in messages short.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
