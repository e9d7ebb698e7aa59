package openaiengine

import (
	"bytes"
	"encoding/json"
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
// the request may be tried elsewhere. What it answers on the paths that are known is
// worded as the worker's own (answer.go): a stream that it breaks off ends with an error
// event.
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
	} else if known(r.URL.Path) && r.Method == http.MethodPost {
		if bad := e.rename(r); bad != nil {
			bad.Write(w)
			return nil
		}
	}
	var broke error // what the client was told only in general
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
			if known(r.URL.Path) {
				return e.worded(resp, &broke)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, cause error) {
			if clientLeft(r.Context()) {
				panic(http.ErrAbortHandler) // the client left, or closed its sending side: this is no answer
			}
			err = cause
			openai.Unavailable(time.Second, "The server behind this worker cannot be reached.").Write(w)
		},
	}
	proxy.ServeHTTP(w, r)
	return errors.Join(err, broke)
}

// rename puts the server's name of the model in the place of the worker's, in a request
// whose body the worker has not read.
func (e *Engine) rename(r *http.Request) *openai.Error {
	body, err := io.ReadAll(r.Body)
	if _, big := errors.AsType[*http.MaxBytesError](err); big {
		return openai.Errorf(http.StatusRequestEntityTooLarge, "The request body is too large.")
	}
	if err != nil {
		return openai.Errorf(http.StatusBadRequest, "The request body could not be read to its end.")
	}
	var asked struct{ Model string }
	if json.Unmarshal(body, &asked) == nil && asked.Model == e.model.Name {
		if named, err := openai.Renamed(body, e.name); err == nil {
			body = named
		}
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return nil
}
