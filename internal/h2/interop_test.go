package h2

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// exchanges is a handler that does by its path what answers can be like.
func exchanges(w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	switch r.URL.Path {
	case "/echo":
		w.Header().Set("X-Length", fmt.Sprint(r.ContentLength))
		_, _ = io.Copy(w, r.Body) // the client sees what is missing
	case "/stream":
		for i := range 100 {
			fmt.Fprintf(w, "event %d\n", i)
			_ = rc.Flush()
		}
	case "/small":
		_, _ = io.WriteString(w, "<html>")
	case "/empty":
		w.WriteHeader(http.StatusNoContent)
	case "/early":
		w.Header().Set("Link", "</a>")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		_, _ = io.WriteString(w, "late")
	case "/headers":
		w.Header()["X-Many"] = []string{r.Header.Get("X-Long"), "b", "c"}
		w.Header().Set("Connection", "close")
		w.Header().Set("X-Cookie", r.Header.Get("Cookie"))
		w.Header().Set("X-Host", r.Host)
	case "/cut":
		_, _ = io.WriteString(w, "half")
		_ = rc.Flush()
		panic(http.ErrAbortHandler)
	case "/short":
		w.Header().Set("Content-Length", "10")
		_, _ = io.WriteString(w, "half")
	case "/unread":
		_, _ = io.WriteString(w, "no need")
	}
}

// pairs are this package and net/http's, with each other and itself.
func pairs(t *testing.T, f func(t *testing.T, tr http.RoundTripper)) {
	t.Run("our server", func(t *testing.T) { f(t, theirs(t, serve(t, newServer(http.HandlerFunc(exchanges))))) })
	t.Run("our transport", func(t *testing.T) { f(t, newTransport(t, theirServer(t, http.HandlerFunc(exchanges)))) })
	t.Run("both", func(t *testing.T) { f(t, newTransport(t, serve(t, newServer(http.HandlerFunc(exchanges))))) })
}

// roundTrip is an answer with its whole body.
func roundTrip(t *testing.T, tr http.RoundTripper, req *http.Request) (*http.Response, string, error) {
	t.Helper()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatalf("%s: %v", req.URL.Path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp, string(body), err
}

func TestAnswers(t *testing.T) {
	pairs(t, func(t *testing.T, tr http.RoundTripper) {
		for _, tc := range []struct {
			method, path string
			status       int
			body         string
			length       int64
			kind         string
		}{
			{"GET", "/small", 200, "<html>", 6, "text/html; charset=utf-8"},
			{"HEAD", "/small", 200, "", -1, ""},
			{"GET", "/empty", 204, "", 0, ""},
			{"GET", "/early", 200, "late", 4, "text/plain; charset=utf-8"},
			{"GET", "/nothing", 200, "", 0, ""},
			{"POST", "/unread", 200, "no need", 7, "text/plain; charset=utf-8"},
		} {
			var body io.Reader
			if tc.method == "POST" {
				body = strings.NewReader("question")
			}
			resp, got, err := roundTrip(t, tr, newRequest(t, tc.method, tc.path, body))
			if err != nil || resp.StatusCode != tc.status || got != tc.body {
				t.Errorf("%s %s: %d %q, %v", tc.method, tc.path, resp.StatusCode, got, err)
			}
			if tc.method != "HEAD" && (resp.ContentLength != tc.length || resp.Header.Get("Content-Type") != tc.kind || resp.Header.Get("Link") != "") {
				t.Errorf("%s %s: length %d, header %v", tc.method, tc.path, resp.ContentLength, resp.Header)
			}
			if resp.Header.Get("Date") == "" {
				t.Errorf("%s: no date", tc.path)
			}
		}
	})
}

func TestBodies(t *testing.T) {
	pairs(t, func(t *testing.T, tr http.RoundTripper) {
		for _, size := range []int{0, 1, 16 << 10, 64<<10 + 1, 5 << 20} {
			data := make([]byte, size)
			_, _ = rand.Read(data) // it never fails
			for _, known := range []bool{true, false} {
				var body io.Reader = bytes.NewReader(data)
				if !known {
					body = io.MultiReader(body)
				}
				resp, got, err := roundTrip(t, tr, newRequest(t, http.MethodPost, "/echo", body))
				if err != nil || got != string(data) {
					t.Errorf("%d bytes: %d back, %v", size, len(got), err)
				}
				if want := fmt.Sprint(size); known && resp.Header.Get("X-Length") != want {
					t.Errorf("the length is %s, want %s", resp.Header.Get("X-Length"), want)
				}
			}
		}
	})
}

func TestHeaders(t *testing.T) {
	pairs(t, func(t *testing.T, tr http.RoundTripper) {
		req := newRequest(t, http.MethodGet, "/headers?a=b", nil)
		long := strings.Repeat("x", 100<<10) // several CONTINUATION frames
		req.Header.Set("X-Long", long)
		req.Header.Add("Cookie", "a=1")
		req.Host = "virtual"
		resp, _, err := roundTrip(t, tr, req)
		many := resp.Header["X-Many"]
		if err != nil || len(many) != 3 || many[0] != long || many[2] != "c" || resp.Header.Get("X-Cookie") != "a=1" || resp.Header.Get("X-Host") != "virtual" {
			t.Errorf("%v, %d values, cookie %q, host %q", err, len(many), resp.Header.Get("X-Cookie"), resp.Header.Get("X-Host"))
		}
		if resp.Header.Get("Connection") != "" {
			t.Error("a field of HTTP/1.1 came through")
		}
	})
}

// What is not whole ends in an error.
func TestCut(t *testing.T) {
	pairs(t, func(t *testing.T, tr http.RoundTripper) {
		for _, path := range []string{"/cut", "/short"} {
			resp, err := tr.RoundTrip(newRequest(t, http.MethodGet, path, nil))
			if err != nil {
				continue // it was reset before its header was looked at
			}
			if got, err := io.ReadAll(resp.Body); err == nil {
				t.Errorf("%s: %q and no error", path, got)
			}
			_ = resp.Body.Close() // it has failed
		}
	})
}

// Many streams at once on one connection, each in its order.
func TestManyAtOnce(t *testing.T) {
	pairs(t, func(t *testing.T, tr http.RoundTripper) {
		var want strings.Builder
		for i := range 100 {
			want.WriteString(fmt.Sprintf("event %d\n", i))
		}
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for range 3 {
					resp, err := tr.RoundTrip(newRequest(t, http.MethodGet, "/stream", nil))
					if err != nil {
						t.Error(err)
						return
					}
					got, err := io.ReadAll(resp.Body)
					if err != nil || string(got) != want.String() {
						t.Errorf("%d bytes, %v", len(got), err)
					}
					_ = resp.Body.Close() // it was read
				}
			})
		}
		wg.Wait()
	})
}

// A client that leaves ends its handler's context, at once.
func TestClientLeaves(t *testing.T) {
	for name, leave := range map[string]func(cancel func(), resp *http.Response){
		"cancels": func(cancel func(), _ *http.Response) { cancel() },
		"closes":  func(_ func(), resp *http.Response) { _ = resp.Body.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan struct{})
			tr := newTransport(t, serve(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
				close(ended)
			}))))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := tr.RoundTrip(newRequest(t, http.MethodGet, "/", nil).WithContext(ctx))
			if err != nil {
				t.Fatal(err)
			}
			leave(cancel, resp)
			<-ended
			if _, err := io.ReadAll(resp.Body); err == nil {
				t.Error("the body ends well")
			}
			_ = resp.Body.Close() // a second time for one
		})
	}
}

// A request that nobody answers ends with its context.
func TestCancelBeforeAnswer(t *testing.T) {
	began := make(chan struct{})
	tr := newTransport(t, serve(t, newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	}))))
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	go func() {
		<-began
		cancel(why)
	}()
	if _, err := tr.RoundTrip(newRequest(t, http.MethodGet, "/", nil).WithContext(ctx)); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

// net/http's trailers arrive with the end of the body.
func TestTrailers(t *testing.T) {
	tr := newTransport(t, theirServer(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		_, _ = io.WriteString(w, "body")
		w.Header().Set("X-Sum", "42")
	})))
	resp, body, err := roundTrip(t, tr, newRequest(t, http.MethodGet, "/", nil))
	if err != nil || body != "body" || resp.Trailer.Get("X-Sum") != "42" {
		t.Errorf("%q, %v, trailer %v", body, err, resp.Trailer)
	}
}

// HTTP/1.1 is served on the same listener, and ends with it.
func TestHTTP1(t *testing.T) {
	s := newServer(http.HandlerFunc(exchanges))
	dial := serve(t, s)
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	defer tr.CloseIdleConnections()
	long := strings.Repeat("a question that is longer than the preface of HTTP/2", 10)
	resp, body, err := roundTrip(t, tr, newRequest(t, http.MethodPost, "/echo", strings.NewReader(long)))
	if err != nil || body != long || resp.ProtoMajor != 1 {
		t.Errorf("%q, %v, HTTP/%d", body, err, resp.ProtoMajor)
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

// A connection that cannot be made is an error of the request.
func TestNoConnection(t *testing.T) {
	why := errors.New("why")
	tr := newTransport(t, func(context.Context) (net.Conn, error) { return nil, why })
	if _, err := tr.RoundTrip(newRequest(t, http.MethodPost, "/", strings.NewReader("x"))); !errors.Is(err, why) || !errors.Is(err, ErrConnect) {
		t.Errorf("got %v", err)
	}
}
