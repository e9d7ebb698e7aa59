package h2

import (
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// errMessage is a header block that HTTP/2 does not allow.
var errMessage = errors.New("h2: malformed message")

// field adds one field to the header block that is being made.
func (c *conn) field(name, value string) {
	_ = c.enc.WriteField(hpack.HeaderField{Name: name, Value: value}) // into memory
}

// fields adds a header, but for what only HTTP/1.1 knows.
func (c *conn) fields(h http.Header) {
	for name, values := range h {
		name = strings.ToLower(name)
		if ofConnection(name) || !httpguts.ValidHeaderFieldName(name) {
			continue
		}
		for _, v := range values {
			if httpguts.ValidHeaderFieldValue(v) && (name != "te" || v == "trailers") {
				c.field(name, v)
			}
		}
	}
}

// ofConnection names the fields that HTTP/2 has no use for.
func ofConnection(name string) bool {
	switch name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		return true
	}
	return false
}

// headersLocked sends the header block that was made.
func (c *conn) headersLocked(id uint32, end bool) {
	rest := c.block.Bytes()
	for first := true; first || len(rest) > 0; first = false {
		part := rest[:min(len(rest), c.peer.frame)]
		rest = rest[len(part):]
		if first {
			_ = c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: part, EndStream: end, EndHeaders: len(rest) == 0})
		} else {
			_ = c.fr.WriteContinuation(id, len(rest) == 0, part) // into memory
		}
	}
	c.block.Reset()
}

// headerOf makes a header of a block's fields. It returns the length that was announced,
// negative where none was.
func headerOf(fields []hpack.HeaderField) (h http.Header, length int64, err error) {
	h, length = make(http.Header, len(fields)), -1
	for _, f := range fields {
		switch {
		case ofConnection(f.Name), f.Name == "te" && f.Value != "trailers":
			return nil, 0, fmt.Errorf("%w: %s", errMessage, f.Name)
		case f.Name == "content-length":
			n, err := strconv.ParseUint(f.Value, 10, 63)
			if err != nil || length >= 0 && length != int64(n) {
				return nil, 0, fmt.Errorf("%w: content-length", errMessage)
			}
			if length >= 0 {
				continue
			}
			length = int64(n)
		case f.Name == "cookie" && h["Cookie"] != nil:
			h["Cookie"][0] += "; " + f.Value
			continue
		}
		name := textproto.CanonicalMIMEHeaderKey(f.Name)
		h[name] = append(h[name], f.Value)
	}
	return h, length, nil
}

// requestOf makes a request of a header block.
func requestOf(f *http2.MetaHeadersFrame) (*http.Request, error) {
	method, path, authority := f.PseudoValue("method"), f.PseudoValue("path"), f.PseudoValue("authority")
	if method == "" || path == "" || f.PseudoValue("scheme") == "" || f.PseudoValue("status") != "" || f.PseudoValue("protocol") != "" {
		return nil, fmt.Errorf("%w: pseudo-header fields", errMessage)
	}
	h, length, err := headerOf(f.RegularFields())
	if err != nil {
		return nil, err
	}
	u, err := url.ParseRequestURI(path)
	if err != nil {
		return nil, fmt.Errorf("%w: path: %w", errMessage, err)
	}
	if authority == "" {
		authority = h.Get("Host")
	}
	delete(h, "Host")
	if f.StreamEnded() {
		if length > 0 {
			return nil, fmt.Errorf("%w: content-length", errMessage)
		}
		length = 0
	}
	return &http.Request{
		Method: method, URL: u, Proto: "HTTP/2.0", ProtoMajor: 2, Header: h, ContentLength: length, Host: authority, RequestURI: path,
	}, nil
}

// answer is the head of a response.
type answer struct {
	status int
	header http.Header
	length int64
}

// answerOf makes the head of a response of a header block.
func answerOf(f *http2.MetaHeadersFrame) (*answer, error) {
	status, err := strconv.Atoi(f.PseudoValue("status"))
	if err != nil || status < 100 || status > 999 || status == http.StatusSwitchingProtocols || f.Truncated {
		return nil, fmt.Errorf("%w: status or size", errMessage)
	}
	h, length, err := headerOf(f.RegularFields())
	if err != nil {
		return nil, err
	}
	return &answer{status, h, length}, nil
}

// hasBody reports whether an answer to that method may have one.
func hasBody(method string, status int) bool {
	return method != http.MethodHead && status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
