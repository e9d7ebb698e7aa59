package extproc

import (
	"net/url"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/kvmesh/kvmesh/internal/names"
)

// head is what the processor needs of a request's headers. Values are as the
// client sent them and may hold any bytes.
type head struct {
	method  string
	path    string // without query, escapes decoded as the workers' servers do
	broken  bool   // the path has an escape that stands for nothing
	length  int64  // content-length, -1 when not given (chunked)
	encoded bool   // a content-encoding other than identity
	last    string // the event that a client has which comes back to a stream
	token   string // session keys
	session string
}

// readHead takes what Envoy sent; names come in lower case.
func readHead(hs []*corev3.HeaderValue) head {
	h := head{length: -1}
	for _, v := range hs {
		switch v.GetKey() {
		case ":method":
			h.method = value(v)
		case ":path":
			h.path, _, _ = strings.Cut(value(v), "?")
			plain, err := url.PathUnescape(h.path)
			if h.broken = err != nil; !h.broken {
				h.path = plain // else /v1%2Fcompletions would go round the gateway
			}
		case "content-length":
			if n, err := strconv.ParseInt(value(v), 10, 64); err == nil && n >= 0 {
				h.length = n
			}
		case "content-encoding":
			s := strings.TrimSpace(value(v))
			h.encoded = s != "" && !strings.EqualFold(s, "identity")
		case names.LastEventID:
			h.last = value(v)
		case names.SessionToken:
			h.token = value(v)
		case names.SessionID:
			h.session = value(v)
		}
	}
	return h
}

// value returns a header's value: Envoy fills raw_value, which keeps bytes that
// are no UTF-8.
func value(v *corev3.HeaderValue) string {
	if raw := v.GetRawValue(); len(raw) > 0 {
		return string(raw)
	}
	return v.GetValue()
}

// key is the session key, the token before the id.
func (h head) key() string {
	if h.token != "" {
		return h.token
	}
	return h.session
}
