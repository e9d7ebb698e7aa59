package openaiengine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// meshHeaders is what the names of the mesh's own headers begin with.
const meshHeaders = "x-kvmesh-"

// Forward implements worker.Proxy. A server that cannot be reached is a 503, so that
// the request may be tried elsewhere; one that breaks off in the middle of an answer
// breaks off the client's.
func (e *Engine) Forward(w http.ResponseWriter, r *http.Request, f *worker.Forwarded) (err error) {
	e.passing.Add(1)
	defer e.passing.Add(-1)
	if f != nil && delivers(f.Delivered) {
		return e.resume(w, r, f)
	}
	if f != nil {
		body := f.Rewritten(e.name, 0)
		if f.TokenIDs {
			body = withTokenIDs(body, f.Request)
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	proxy := httputil.ReverseProxy{
		Transport:     e.cfg.Transport,
		FlushInterval: -1, // every token at once
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(e.upstream)
			for name := range p.Out.Header {
				if strings.HasPrefix(strings.ToLower(name), meshHeaders) {
					delete(p.Out.Header, name) // the relay's secret among them
				}
			}
			p.Out.Header["Accept-Encoding"] = nil // compression would hold tokens back
			e.authorize(p.Out.Header)
		},
		ModifyResponse: func(resp *http.Response) error {
			for name := range resp.Header {
				if strings.HasPrefix(strings.ToLower(name), meshHeaders) {
					delete(resp.Header, name) // only a worker says who it is
				}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, cause error) {
			if errors.Is(cause, context.Canceled) && r.Context().Err() != nil {
				panic(http.ErrAbortHandler) // the client left, or closed its sending side: this is no answer
			}
			err = cause
			openai.Unavailable(time.Second, "The server behind this worker cannot be reached.").Write(w)
		},
	}
	proxy.ServeHTTP(w, r)
	return err
}
