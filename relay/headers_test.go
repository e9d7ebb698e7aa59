package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestRetryAfter: what a server says of waiting is read, and reaches clients, only where it
// is one of the two forms that there are, and at most an hour.
func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	date := func(d time.Duration) string { return now.Add(d).Format(http.TimeFormat) }
	for _, tt := range []struct {
		in, out string
		wait    time.Duration
	}{
		{"0", "0", 0},
		{"7", "7", 7 * time.Second},
		{"007", "007", 7 * time.Second},
		{"3599", "3599", 3599 * time.Second},
		{"3601", "3600", time.Hour},
		{"99999999999999999999", "3600", time.Hour},
		{"-1", "", 0},
		{"+1", "", 0},
		{"5.5", "", 0},
		{"", "", 0},
		{"soon", "", 0},
		{"1e3", "", 0},
		{"5, 6", "", 0},
		{"٣", "", 0},
		{date(90 * time.Second), date(90 * time.Second), 90 * time.Second},
		{date(-time.Minute), date(-time.Minute), 0},
		{date(48 * time.Hour), "3600", time.Hour},
	} {
		h := http.Header{"Retry-After": {tt.in}}
		if got := retryAfter(h, now); got != tt.wait {
			t.Errorf("%q: to wait %v, want %v", tt.in, got, tt.wait)
		}
		checkRetryAfter(h, now)
		if got, ok := h["Retry-After"]; strings.Join(got, "|") != tt.out || ok != (tt.out != "") {
			t.Errorf("%q: the client gets %q, want %q", tt.in, got, tt.out)
		}
	}
	twice := http.Header{"Retry-After": {"1", "x"}}
	if checkRetryAfter(twice, now); len(twice["Retry-After"]) != 1 || twice.Get("Retry-After") != "1" {
		t.Errorf("two of them become %q", twice["Retry-After"])
	}
	if h := answerHeader(http.Header{}, "w1"); len(h["Retry-After"]) != 0 {
		t.Error("none becomes one")
	}
}

// TestRetryAfterOfServers: no way to the client passes on what it would stumble over.
func TestRetryAfterOfServers(t *testing.T) {
	for _, tt := range []struct {
		status     int
		kind, want string // want is for "-1"
	}{
		{200, "application/json", ""},
		{400, "application/json", ""},
		{400, "text/html", ""},
		{429, "application/json", ""},
		{503, "application/json", ""},
		{500, "application/json", ""},
		{429, "text/plain", "1"},
	} {
		for after, want := range map[string]string{"-1": tt.want, "99999999999999999999": "3600"} {
			serve := func(_ int, w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", after)
				w.Header().Set("Content-Type", tt.kind)
				w.WriteHeader(tt.status)
				_, _ = w.Write([]byte(complete))
			}
			inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
				if got := m.ask(askWhole); got.status != tt.status || got.header.Get("Retry-After") != want {
					t.Errorf("%d %s with %s: status %d, Retry-After %q, want %q", tt.status, tt.kind, after, got.status, got.header.Get("Retry-After"), want)
				}
			})
		}
	}
}
