package relay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

// inRow starts a gateway on a socket that gateways have one after the other.
func inRow(t *testing.T, socket string, change func(*Config)) *mesh {
	t.Helper()
	fresh := socket + ".fresh"
	lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	lis.SetUnlinkOnClose(false) // by then it is another's
	if err := os.Rename(fresh, socket); err != nil {
		t.Fatal(err)
	}
	m := serveOn(t, lis, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}, func(c *Config) {
		c.Socket = socket
		if change != nil {
			change(c)
		}
	}, well(t))
	if resp := m.connectTo(http.MethodGet, "x:1"); resp.StatusCode != http.StatusNotFound { // its connection is to this one, whatever comes
		t.Errorf("status %d", resp.StatusCode)
	}
	return m
}

// replace has the gateway be replaced by whoever has its socket.
func (m *mesh) replace() {
	m.t.Helper()
	if err := m.relay.Replaced(); err != nil {
		m.t.Error(err)
	}
	m.stop()
}

func (m *mesh) handed(to string) int {
	return int(testutil.ToFloat64(m.relay.kept.gauge.passed.WithLabelValues(byRestart, to)))
}

const askLong = `{"model":"m","prompt":"p","stream":true,"max_tokens":40,"stream_options":{"include_usage":true}}`

// What clients have left behind goes to the next gateway when theirs is replaced, be it
// over or not, with a shared store or without; and the old one ends.
func TestHandedOver(t *testing.T) {
	t.Parallel() // most of it is waiting
	for name, share := range map[string]func(*Config){"alone": nil, "shared": shares(t, redistest.Start(t))} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "r")
			a := inRow(t, socket, share)
			ids := []string{"s1", "s2", "s3"}
			read := map[string]string{}
			for i, id := range ids {
				body := askLong
				if i == 0 {
					body = strings.Replace(askLong, "40", "4", 1) // is over
				}
				read[id] = a.leave(2+i, body, names.Stream, id, "Authorization", id)
			}
			until(t, "the first answer is over", func() bool {
				a.relay.kept.mu.Lock()
				defer a.relay.kept.mu.Unlock()
				return a.relay.kept.streams["s1"].over
			})
			b := inRow(t, socket, share)
			a.replace()
			<-a.done
			if a.handed(passedAway) != 3 || b.handed(passedHere) != 3 || a.dropped(droppedStopped) != 0 {
				t.Errorf("%d handed over, %d taken, %d stopped", a.handed(passedAway), b.handed(passedHere), a.dropped(droppedStopped))
			}
			for i, id := range ids {
				if got := b.back(id+":1", "Authorization", "x"); got.status != http.StatusNotFound {
					t.Errorf("%s for another: status %d", id, got.status)
				}
				got := b.back(fmt.Sprintf("%s:%d", id, 2+i), "Authorization", id)
				all := strings.ReplaceAll(read[id]+got.body, "id: "+id, "id: stream-1")
				b.checkWhole(b.numbered(all), 1, []int{4, 40, 40}[i], true)
			}
			if share == nil {
				return
			}
			c := inRealTime(t, share, well(t)) // and the store has them, too
			got := c.back("s3:4", "Authorization", "s3")
			c.checkWhole(c.numbered(strings.ReplaceAll(read["s3"]+got.body, "id: s3", "id: stream-1")), 1, 40, true)
		})
	}
}

// A client that is connected when its gateway is replaced has its answer from there to the
// end. If it comes to the next one, it has the rest there, whatever the old one knows of
// its connection.
func TestHandedOverOnDemand(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, nil)
	open := func(id string) (*http.Response, *bufio.Reader, string) {
		resp, err := a.post(t.Context(), askLong, names.Resumable, "1", names.Stream, id)
		if err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(resp.Body)
		return resp, r, events(t, r, 3)
	}
	stays, staying, read := open("stream-1")
	defer stays.Body.Close()
	goes, going, begun := open("s2")
	defer goes.Body.Close()
	b := inRow(t, socket, nil)
	a.replace()
	for _, try := range [][]string{{"s2:3", "Authorization", "x"}, {"s2:1000"}, {"s4:1"}} {
		if got := b.back(try[0], try[1:]...); got.status != http.StatusNotFound {
			t.Errorf("%v: status %d", try, got.status)
		}
	}
	got := b.back("s2:3")
	b.checkWhole(b.numbered(strings.ReplaceAll(begun+got.body, "id: s2", "id: stream-1")), 1, 40, true)
	rest, err := io.ReadAll(going)
	if err != nil || !strings.Contains(string(rest), "stream_taken_over") || strings.Contains(string(rest), done) {
		t.Errorf("the old connection: %v, %s", err, rest)
	}
	rest, err = io.ReadAll(staying)
	if err != nil {
		t.Error(err)
	}
	a.checkWhole(a.numbered(read+string(rest)), 1, 40, true)
	<-a.done
	if a.handed(passedAway) != 2 { // the one that stayed, too, when its client left
		t.Errorf("%d handed over", a.handed(passedAway))
	}
	again := b.back("stream-1:3")
	b.checkWhole(b.numbered(read+again.body), 1, 40, true)
}

// When the old gateway's time is over, the answers that still run go to the next one, and
// their clients hear that they should come back.
func TestHandedOverAtLast(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, func(c *Config) { c.Drain = 100 * time.Millisecond })
	resp, err := a.post(t.Context(), strings.Replace(askLong, "40", "100", 1), names.Resumable, "1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stream := bufio.NewReader(resp.Body)
	read := events(t, stream, 3)
	b := inRow(t, socket, nil)
	a.replace()
	rest, err := io.ReadAll(stream)
	read += string(rest)
	at := strings.Index(read, "data: {\"error\"")
	if err != nil || at < 0 || !strings.Contains(read[at:], "The gateway is stopping") || strings.Contains(read, done) {
		t.Fatalf("%v after %s", err, read)
	}
	<-a.done
	read = read[:at]
	got := b.back(fmt.Sprintf("stream-1:%d", strings.Count(read, "\n\n")))
	b.checkWhole(b.numbered(read+got.body), 1, 100, true)
}

// Nobody without the secret hands a stream over or asks for one; a gateway that nobody
// follows says so.
func TestHandoverRefused(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, nil)
	other, err := newSealer("other")
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := other.seal(handoverPath, passedOn{Head: recordHead{Stream: "s"}})
	if err != nil {
		t.Fatal(err)
	}
	for what, body := range map[string]string{"another secret": string(sealed), "none": "{}"} {
		for _, path := range []string{handoverPath, lastWordPath} {
			resp, err := a.client.Post("http://mesh"+path, "", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if _ = resp.Body.Close(); resp.StatusCode != http.StatusForbidden || a.relay.kept.has("s") {
				t.Errorf("%s, %s: status %d", path, what, resp.StatusCode)
			}
		}
	}
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	a.leave(3, askLong)
	a.replace()
	<-a.done
	if a.dropped(droppedStopped) != 1 {
		t.Errorf("%d streams stopped", a.dropped(droppedStopped))
	}
	if left, _ := filepath.Glob(socket + ".*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A token that was on its way when its stream was given away is part of what the next
// gateway gets, for the ledger counts it already; how the job ends here is not.
func TestGivenStreamTakesTokens(t *testing.T) {
	k, err := newRetained(1<<20, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	s := &keptStream{all: k, mark: []byte("id: s:"), head: http.Header{"Content-Type": {"text/event-stream"}}, size: 1 << 20, given: make(chan struct{})}
	if _, err := s.Write([]byte("id: s:1\ndata: {}\n\n")); err != nil || len(s.events) != 1 || s.numbered != 1 {
		t.Errorf("a token: %v, %d events", err, len(s.events))
	}
	if _, err := s.Write([]byte("data: {\"error\":{}}\n\n")); !errors.Is(err, errNotKept) || len(s.events) != 1 {
		t.Errorf("an error: %v, %d events", err, len(s.events))
	}
}
