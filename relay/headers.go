package relay

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
)

// outHeader makes the header of an attempt out of the client's. Credentials pass:
// a foreign server may want them.
func outHeader(in http.Header) http.Header {
	out := passed(in)
	// An answer is read on the way, so it must come uncompressed; the body is held
	// already, so nobody waits for a 100.
	for _, name := range []string{"Accept-Encoding", "Expect", names.Route, names.ModelRoute, names.Destination, names.Pool, names.Stream, names.Attempt, names.ExpectWorker, names.Resumable, names.LastEventID} {
		out.Del(name)
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = nil // keeps the transport from adding its own
	}
	return out
}

// answerHeader makes the header of the client's answer out of the worker's. A
// foreign server does not name itself, so the mesh does.
func answerHeader(in http.Header, worker string) http.Header {
	out := passed(in)
	out.Del(names.Upstream)
	out.Del(names.Fault)
	out.Del("Endpoint-Load-Metrics")
	if out.Get(names.Worker) == "" {
		out.Set(names.Worker, worker)
	}
	checkRetryAfter(out, time.Now())
	return out
}

// Limits of an answer's header. The edge takes 60 KiB and 100 fields from the relay, which
// adds some, and refuses the whole answer if there are more; then nobody could be asked
// instead any more.
const (
	mostAnswerHeader = 56 << 10
	mostAnswerFields = 90
)

// crowded reports whether a header is over these limits.
func crowded(h http.Header) bool {
	fields, size := 0, 0
	for name, values := range h {
		fields += len(values)
		for _, v := range values {
			size += len(name) + len(v)
		}
	}
	return fields > mostAnswerFields || size > mostAnswerHeader
}

// longestWait is the most that a client is told to wait, whatever its server says.
const longestWait = time.Hour

// waitOf reads a Retry-After, which is a whole number of seconds or a date; at most
// longestWait. ok is false where it is neither.
func waitOf(v string, now time.Time) (wait time.Duration, ok bool) {
	if at, err := http.ParseTime(v); err == nil {
		return min(max(at.Sub(now), 0), longestWait), true
	}
	if v == "" || strings.Trim(v, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(v)
	if err != nil || n >= int(longestWait/time.Second) { // or more than an int holds
		return longestWait, true
	}
	return time.Duration(n) * time.Second, true
}

// retryAfter is how long a server asks to wait, 0 when it does not.
func retryAfter(h http.Header, now time.Time) time.Duration {
	wait, _ := waitOf(h.Get("Retry-After"), now)
	return wait
}

// checkRetryAfter leaves no Retry-After in a header that a client would stumble over.
func checkRetryAfter(h http.Header, now time.Time) {
	values, ok := h["Retry-After"]
	if !ok {
		return
	}
	switch wait, ok := waitOf(h.Get("Retry-After"), now); {
	case !ok:
		delete(h, "Retry-After")
	case wait == longestWait:
		h["Retry-After"] = []string{strconv.Itoa(int(longestWait / time.Second))}
	case len(values) > 1:
		h["Retry-After"] = values[:1]
	}
}

// passed copies a header without what belongs to one connection only, the length,
// and Envoy's own.
func passed(in http.Header) http.Header {
	out := make(http.Header, len(in)+4)
	for name, values := range in {
		if !strings.HasPrefix(name, "X-Envoy-") {
			out[name] = values
		}
	}
	for _, v := range in["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			out.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{
		"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length",
	} {
		delete(out, name)
	}
	return out
}

// isJSON and isEvents look at a content type.
func isJSON(h http.Header) bool   { return hasType(h, "application/json") }
func isEvents(h http.Header) bool { return hasType(h, "text/event-stream") }

func hasType(h http.Header, want string) bool {
	got, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(got), want)
}
