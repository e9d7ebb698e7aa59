package modelstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvmesh/kvmesh/internal/s3link"
)

// stall is how long a source may send nothing before the connection is given up.
const stall = 30 * time.Second

// Sources says how models are reached: by file path, http(s):// or s3:// URL.
type Sources struct {
	S3 s3link.Config
	// HTTP makes the requests, nil for a client with the usual proxy settings.
	HTTP *http.Client
}

// temporary marks an error after which another try may help.
type temporary struct{ error }

// errRange says that the source ends before the offset that was asked for.
var errRange = errors.New("the source is shorter than what is here already")

// Unwrap lets errors.Is see through the mark.
func (t temporary) Unwrap() error { return t.error }

// open reads a location from an offset on. at is where the data begins: 0 when the
// source does not know how to skip.
func (s Sources) open(ctx context.Context, location string, offset int64) (body io.ReadCloser, at int64, err error) {
	u, err := url.Parse(location)
	if err != nil || len(u.Scheme) < 2 { // a drive letter is no scheme
		u = &url.URL{Scheme: "file", Path: location}
	}
	switch u.Scheme {
	case "http", "https":
		return s.openHTTP(ctx, u, offset)
	case "s3":
		return s.openS3(ctx, u, offset)
	case "file":
		return openFile(u.Path, offset)
	}
	return nil, 0, fmt.Errorf("%s: want a file, an http(s):// or an s3:// URL", shown(location))
}

// openFile reads from this machine.
func openFile(name string, offset int64) (io.ReadCloser, int64, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, 0, err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, offset, nil
}

// openHTTP asks for a range when there is something already.
func (s Sources) openHTTP(ctx context.Context, u *url.URL, offset int64) (io.ReadCloser, int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		cancel(nil)
		return nil, 0, fmt.Errorf("%s: %w", shown(u.String()), err)
	}
	// Some servers compress what they think is text, and a range of that is another.
	req.Header.Set("Accept-Encoding", "identity")
	if offset > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	body := newPatient(cancel)
	res, err := s.client().Do(req)
	if err != nil {
		body.stop()
		return nil, 0, temporary{fmt.Errorf("%s: %w", shown(u.String()), clean(ctx, err))}
	}
	body.from = res.Body
	at, err := begins(res, offset)
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("%s: %w", shown(u.String()), err), body.Close())
	}
	return body, at, nil
}

// begins tells where the body of an answer begins.
func begins(res *http.Response, offset int64) (int64, error) {
	switch {
	case res.StatusCode == http.StatusOK:
		return 0, nil
	case res.StatusCode == http.StatusPartialContent && offset > 0:
		start, _, ok := strings.Cut(strings.TrimPrefix(res.Header.Get("Content-Range"), "bytes "), "-")
		if at, err := strconv.ParseInt(start, 10, 64); ok && err == nil && at == offset {
			return at, nil
		}
		return 0, temporary{fmt.Errorf("asked for bytes from %d, got %q", offset, res.Header.Get("Content-Range"))}
	case res.StatusCode == http.StatusRequestedRangeNotSatisfiable && offset > 0:
		return 0, errRange
	case res.StatusCode >= 500 || res.StatusCode == http.StatusTooManyRequests || res.StatusCode == http.StatusRequestTimeout:
		return 0, temporary{fmt.Errorf("status %s", res.Status)}
	}
	return 0, fmt.Errorf("status %s", res.Status)
}

// client returns the HTTP client.
func (s Sources) client() *http.Client {
	if s.HTTP != nil {
		return s.HTTP
	}
	return http.DefaultClient
}

// openS3 reads an object.
func (s Sources) openS3(ctx context.Context, u *url.URL, offset int64) (io.ReadCloser, int64, error) {
	core, err := s3link.Open(s.S3)
	if err != nil {
		return nil, 0, err
	}
	var opts minio.GetObjectOptions
	if offset > 0 {
		if err := opts.SetRange(offset, 0); err != nil {
			return nil, 0, err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	body := newPatient(cancel)
	object, _, _, err := core.GetObject(ctx, u.Host, strings.TrimPrefix(u.Path, "/"), opts)
	if err != nil {
		body.stop()
		code := minio.ToErrorResponse(err).StatusCode // which does not look through wrapping
		err = fmt.Errorf("%s: %w", u, clean(ctx, err))
		switch {
		case code == http.StatusRequestedRangeNotSatisfiable && offset > 0:
			return nil, 0, errRange
		case code >= 400 && code < 500 && code != http.StatusTooManyRequests:
			return nil, 0, err
		}
		return nil, 0, temporary{err}
	}
	body.from = object
	return body, offset, nil
}

// patient is a body that is given up when nothing comes for stall.
type patient struct {
	from   io.ReadCloser
	timer  *time.Timer
	cancel context.CancelCauseFunc
}

// errStalled is why a connection was given up.
var errStalled = temporary{fmt.Errorf("nothing came for %v", stall)}

// newPatient starts the clock, which the first bytes have to beat too.
func newPatient(cancel context.CancelCauseFunc) *patient {
	return &patient{cancel: cancel, timer: time.AfterFunc(stall, func() { cancel(errStalled) })}
}

// Read implements io.Reader.
func (p *patient) Read(b []byte) (int, error) {
	n, err := p.from.Read(b)
	if n > 0 {
		p.timer.Reset(stall)
	}
	return n, err
}

// stop frees what the clock holds.
func (p *patient) stop() {
	p.timer.Stop()
	p.cancel(nil)
}

// Close implements io.Closer.
func (p *patient) Close() error {
	p.stop()
	return p.from.Close()
}

// clean takes the URL, which may hold a password, out of a client's error, and says
// why it gave up where that was its own decision.
func clean(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, errStalled) {
		return cause
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		return ue.Err
	}
	return err
}

// passing reports whether another try may help.
func passing(err error) bool {
	if _, ok := errors.AsType[temporary](err); ok {
		return true
	}
	_, network := errors.AsType[net.Error](err)
	return network || errors.Is(err, io.ErrUnexpectedEOF)
}

// shown is a location as messages may have it.
func shown(location string) string {
	if u, err := url.Parse(location); err == nil && u.Scheme != "" {
		u.User, u.RawQuery = nil, ""
		return u.String()
	}
	return location
}

// beside resolves where a file of a manifest is.
func beside(manifest string, f File) (string, error) {
	ref := f.URL
	if ref == "" {
		ref = (&url.URL{Path: f.Path}).EscapedPath()
	}
	to, err := url.Parse(ref)
	if err != nil {
		return "", fmt.Errorf("url of %s: %w", f.Path, errors.New("not a URL"))
	}
	base, err := url.Parse(manifest)
	local := err != nil || len(base.Scheme) < 2 || base.Scheme == "file"
	switch {
	case len(to.Scheme) > 1 && to.Scheme != "file":
		return to.String(), nil
	case to.Scheme == "file" && !local:
		return "", fmt.Errorf("url of %s: a manifest from elsewhere cannot name files of this machine", f.Path)
	case to.Scheme == "file":
		return to.Path, nil
	case local:
		dir := filepath.Dir(strings.TrimPrefix(manifest, "file://"))
		if path.IsAbs(to.Path) {
			return to.Path, nil
		}
		return filepath.Join(dir, filepath.FromSlash(to.Path)), nil
	}
	return base.ResolveReference(to).String(), nil
}
