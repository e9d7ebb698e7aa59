package relay

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// heldBody is a request body in memory with its share of the budget. One
// goroutine owns it; release may be called more than once.
type heldBody struct {
	data   []byte
	budget *semaphore.Weighted
	held   int64
}

// Errors of reading within limits.
var (
	errTooLarge = errors.New("larger than allowed")
	errNoRoom   = errors.New("budget of held bodies is used up")
)

// step is how much of the budget a body of unknown length takes at a time.
const step = 64 << 10

// read reads all of src, at most limit bytes, taking what it holds from the
// budget. size is the length where it is known, else negative. On an error
// nothing stays held.
func (b *heldBody) read(src io.Reader, size, limit int64) error {
	if size > limit {
		return errTooLarge
	}
	first := size
	if size < 0 {
		first = min(step, limit)
	}
	if !b.hold(first) {
		return errNoRoom
	}
	// One byte more than announced: the end is seen without growing, and a body
	// longer than allowed is seen without reading it all.
	buf := make([]byte, 0, first+1)
	for {
		n, err := src.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case int64(len(buf)) > limit:
			b.release()
			return errTooLarge
		case errors.Is(err, io.EOF):
			b.data = buf
			return nil
		case err != nil:
			b.release()
			return err
		case len(buf) < cap(buf):
			continue
		}
		grow := min(int64(cap(buf)), limit+1-int64(len(buf)))
		if !b.hold(grow) {
			b.release()
			return errNoRoom
		}
		buf = append(make([]byte, 0, int64(cap(buf))+grow), buf...)
	}
}

// hold takes n more bytes from the budget without waiting for them: a body that
// waited would itself be held.
func (b *heldBody) hold(n int64) bool {
	if n > 0 && !b.budget.TryAcquire(n) {
		return false
	}
	b.held += max(n, 0)
	return true
}

// release drops the bytes and gives their share back.
func (b *heldBody) release() {
	b.data = nil
	if b.held > 0 {
		b.budget.Release(b.held)
		b.held = 0
	}
}

// readBody reads the body of a client's request.
func (r *Relay) readBody(w http.ResponseWriter, in *http.Request) (*heldBody, *openai.Error) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(r.cfg.BodyTimeout)) // where it cannot be set, Envoy's time-outs hold
	defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	limit := int64(r.cfg.Policy.Mesh.MaxBody)
	b := &heldBody{budget: r.cfg.Held}
	switch err := b.read(in.Body, in.ContentLength, limit); {
	case err == nil:
		return b, nil
	case errors.Is(err, errTooLarge):
		return nil, openai.Errorf(http.StatusRequestEntityTooLarge, "The request body is too large: at most %d bytes are accepted.", limit)
	case errors.Is(err, errNoRoom):
		return nil, openai.Unavailable(time.Second, "The server holds as many request bodies as it can. Please try again.")
	}
	return nil, openai.Errorf(http.StatusBadRequest, "The request body could not be read to its end.")
}

// sending is the body of one attempt. The transport keeps it as long as the
// response is read, which for a stream is long after its bytes went out; it calls
// Close when it needs them no more, possibly during a Read, and Close lets go of
// them. Safe for that concurrent use.
type sending struct{ r atomic.Pointer[io.Reader] }

func newSending(parts ...[]byte) *sending {
	s := &sending{}
	readers := make([]io.Reader, len(parts))
	for i, p := range parts {
		readers[i] = bytes.NewReader(p)
	}
	all := io.MultiReader(readers...)
	s.r.Store(&all)
	return s
}

// Read implements io.Reader.
func (s *sending) Read(p []byte) (int, error) {
	if r := s.r.Load(); r != nil {
		return (*r).Read(p)
	}
	return 0, io.EOF
}

// Close implements io.Closer.
func (s *sending) Close() error {
	s.r.Store(nil)
	return nil
}
