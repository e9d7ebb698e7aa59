package relay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

// inRealTime runs a mesh outside of a bubble, since Redis knows no fake time, until the
// test ends.
func inRealTime(t *testing.T, change func(*Config), worker func(int, http.ResponseWriter, *http.Request, string)) *mesh {
	t.Helper()
	edge := bufconn.Listen(64 << 10)
	return serveOn(t, edge, func(ctx context.Context) (net.Conn, error) { return edge.DialContext(ctx) }, change, worker)
}

// serveOn is inRealTime with a listener, and how it is reached.
func serveOn(t *testing.T, edge net.Listener, dial func(context.Context) (net.Conn, error), change func(*Config), worker func(int, http.ResponseWriter, *http.Request, string)) *mesh {
	t.Helper()
	egress := bufconn.Listen(64 << 10)
	m := newMesh(t, func(c *Config) {
		own(c)
		change(c)
	}, func(ctx context.Context) (net.Conn, error) { return egress.DialContext(ctx) })
	m.serve = scripted(t, &m, worker)
	workers := &http.Server{Handler: m, Protocols: protocols(false), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { _ = workers.Serve(egress) }()
	m.connect(edge, dial)
	t.Cleanup(func() {
		m.client.CloseIdleConnections()
		m.stop()
		<-m.done
		_ = workers.Close()
	})
	return m
}

// shares has a gateway share its streams; its wait is long, for a busy machine is no
// slow store.
func shares(t *testing.T, s *redistest.Server) func(*Config) {
	return func(c *Config) {
		client, err := redislink.Open(redislink.Config{URL: s.URL()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() }) // its server may be gone
		c.Streams, c.Policy.Mesh.ShareWait = client, policy.Duration(time.Minute)
	}
}

// until polls what another goroutine does.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); sleep(t.Context(), 5*time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

// idle reports whether no worker carries anything of the gateway.
func (m *mesh) idle() bool {
	for _, v := range m.picker.Workers(time.Now()) {
		if v.InFlight != 0 {
			return false
		}
	}
	return true
}

func (m *mesh) passed(to string) int {
	return int(testutil.ToFloat64(m.relay.kept.gauge.passed.WithLabelValues(byStore, to)))
}

const askTwo = `{"model":"m","prompt":"p","stream":true,"n":2,"max_tokens":8,"stream_options":{"include_usage":true}}`

// Wherever a client leaves one gateway, it gets the rest at another, and the first one
// lets go.
func TestShared(t *testing.T) {
	t.Parallel() // most of it is waiting
	s := redistest.Start(t)
	share := shares(t, s)
	for n := 1; n < 8*2+4; n += 5 {
		if err := s.Client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		a, b := inRealTime(t, share, well(t)), inRealTime(t, share, well(t))
		read := a.leave(n, askTwo, names.Stream, "stream-1", "Authorization", "Bearer a")
		for _, try := range [][]string{{"stream-1:1"}, {"stream-1:1", "Authorization", "Bearer b"}, {"stream-1:99", "Authorization", "Bearer a"}, {"stream-2:1", "Authorization", "Bearer a"}} {
			if got := b.back(try[0], try[1:]...); got.status != http.StatusNotFound {
				t.Errorf("%v: status %d", try, got.status)
			}
		}
		rest := b.back(fmt.Sprintf("stream-1:%d", n), "Authorization", "Bearer a")
		all := b.numbered(read + rest.body)
		b.checkWhole(all, 2, 8, true)
		until(t, "the first gateway lets go of it", func() bool {
			return a.passed(passedAway) == 1 && a.idle() && a.keptBytes() == 0
		})
		if b.passed(passedHere) != 1 {
			t.Errorf("%d streams came here", b.passed(passedHere))
		}
		again := a.back("stream-1:0", "Authorization", "Bearer a") // and back: it is over, and still there
		if got := a.numbered(again.body); got != all {
			t.Errorf("left after %d events, back at the first gateway: %d\n%s\nwant\n%s", n, again.status, got, all)
		}
	}
}

// What a gateway that is stopped had in the store, clients get from another one: those that
// were away, and those that were connected until its time was over.
func TestSharedStopped(t *testing.T) {
	t.Parallel() // most of it is waiting
	share := shares(t, redistest.Start(t))
	a := inRealTime(t, func(c *Config) {
		share(c)
		c.Drain = 50 * time.Millisecond
	}, well(t))
	b := inRealTime(t, share, well(t))
	body := strings.Replace(askUsage, `"max_tokens":10`, `"max_tokens":60`, 1)
	away := a.leave(3, body, names.Stream, "s2")
	resp, err := a.post(t.Context(), body, names.Resumable, "1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stream := bufio.NewReader(resp.Body)
	read := events(t, stream, 3)
	a.stop()
	rest, err := io.ReadAll(stream)
	read += string(rest)
	at := strings.Index(read, "data: {\"error\"")
	if err != nil || at < 0 || strings.Contains(read, done) {
		t.Fatalf("%v after %s", err, read)
	}
	<-a.done
	read = read[:at]
	got := b.back(fmt.Sprintf("stream-1:%d", strings.Count(read, "\n\n")))
	b.checkWhole(b.numbered(read+got.body), 1, 60, true)
	got = b.back("s2:3")
	b.checkWhole(b.numbered(strings.ReplaceAll(away+got.body, "id: s2", "id: stream-1")), 1, 60, true)
}

// A gateway with another secret can neither read a stream nor take it.
func TestSharedSecret(t *testing.T) {
	t.Parallel() // most of it is waiting
	s := redistest.Start(t)
	a := inRealTime(t, shares(t, s), well(t))
	b := inRealTime(t, func(c *Config) {
		shares(t, s)(c)
		c.Secret = "another"
	}, well(t))
	read := a.leave(3, askUsage)
	if got := b.back("stream-1:3"); got.status != http.StatusNotFound {
		t.Errorf("status %d", got.status)
	}
	if got := a.numbered(read + a.back("stream-1:3").body); !strings.HasSuffix(got, done) {
		t.Errorf("its own gateway has %s", got)
	}
}

// What is stored of a long answer is bounded, and the rest of it goes on all the same,
// from all tokens that there were.
func TestSharedSize(t *testing.T) {
	t.Parallel() // most of it is waiting
	const size = 8 << 10
	s := redistest.Start(t)
	change := func(c *Config) {
		shares(t, s)(c)
		for i := range c.Policy.Routes {
			c.Policy.Routes[i].Stream.RetainSize = size
		}
	}
	a, b := inRealTime(t, change, well(t)), inRealTime(t, change, well(t))
	body := strings.Replace(askUsage, `"max_tokens":10`, `"max_tokens":200`, 1)
	read := a.leave(190, body) // what comes after that fits beside it, however late somebody comes back
	stored := 0
	for k, v := range s.Client.HGetAll(t.Context(), keyOf("stream-1")).Val() {
		if _, err := strconv.Atoi(k); err == nil {
			stored += len(v)
		}
	}
	if stored == 0 || stored > 2*size {
		t.Errorf("%d bytes are stored", stored)
	}
	if got := b.back("stream-1:1"); got.status != http.StatusNotFound {
		t.Errorf("the beginning is still there: %d", got.status)
	}
	rest := b.back("stream-1:190")
	b.checkWhole(b.numbered(read+rest.body), 1, 200, true)
}

// stopped stops a server with SIGSTOP until the function it returns is called.
func stopped(t *testing.T, s *redistest.Server) (goOn func()) {
	t.Helper()
	info := s.Client.Info(t.Context(), "server").Val()
	_, rest, _ := strings.Cut(info, "process_id:")
	line, _, _ := strings.Cut(rest, "\r")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatalf("no process_id in %q", info)
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn = func() { _ = syscall.Kill(pid, syscall.SIGCONT) } // the test may be over
	t.Cleanup(goOn)
	return goOn
}

// While the store hangs, answers go on; who asks for another gateway's stream is told to
// try again; and when it is back, what flows is shared anew.
func TestSharedHung(t *testing.T) {
	t.Parallel() // most of it is waiting
	s := redistest.Start(t)
	share := func(c *Config) {
		shares(t, s)(c)
		c.Policy.Mesh.ShareWait = policy.Duration(5 * time.Millisecond)
	}
	a, b := inRealTime(t, share, well(t)), inRealTime(t, share, well(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := a.post(ctx, strings.Replace(endless, `"m"`, `"other-name"`, 1), names.ModelRoute, "long", names.Resumable, "1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stream := bufio.NewReader(resp.Body) // events reads from it as it is
	read := events(t, stream, 5)
	goOn := stopped(t, s)
	trouble := func(what string) float64 {
		return testutil.ToFloat64(a.relay.kept.shared.gauge.trouble.WithLabelValues(what))
	}
	for trouble(troubleDown) == 0 || trouble(troubleSlow) == 0 {
		read += events(t, stream, 1) // ends with an error if none comes
	}
	read += events(t, stream, 5)
	if got := b.back("stream-1:3"); got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
		t.Errorf("status %d, %v", got.status, got.header)
	}
	goOn()
	has := func() int {
		n, _ := s.Client.HGet(t.Context(), keyOf("stream-1"), "n").Int() // 0 while there is none
		return n
	}
	for n := strings.Count(read, "\n\n"); has() < n; n++ {
		read += events(t, stream, 1)
	}
	back := b.connectTo(http.MethodGet, "stream-1:2")
	defer back.Body.Close()
	n := strings.Count(read, "\n\n") - 2
	if got, want := events(t, back.Body, n+20), read[strings.Index(read, "id: stream-1:3\n"):]; !strings.HasPrefix(got, want) {
		t.Errorf("the other gateway has\n%s\nwant\n%s", got, want)
	}
}

// An answer that ended while the store hung, and one that the store has lost, are told anew
// although no event of them comes any more.
func TestSharedEnded(t *testing.T) {
	t.Parallel() // most of it is waiting
	s := redistest.Start(t)
	share := func(c *Config) {
		shares(t, s)(c)
		c.Policy.Mesh.ShareWait = policy.Duration(5 * time.Millisecond)
	}
	a, b := inRealTime(t, share, well(t)), inRealTime(t, share, well(t))
	for i, trouble := range []func() (end func()){
		func() func() { return stopped(t, s) },
		func() func() { return func() { s.Client.FlushAll(t.Context()) } },
	} {
		id := fmt.Sprintf("ended-%d", i)
		end := trouble()
		read := a.leave(3, askUsage, names.Stream, id)
		until(t, "the answer has ended", a.idle)
		if i == 0 {
			until(t, "the store fails", func() bool {
				return testutil.ToFloat64(a.relay.kept.shared.gauge.trouble.WithLabelValues(troubleDown)) > 0
			})
		} else {
			until(t, "the store has it", func() bool { return s.Client.Exists(t.Context(), keyOf(id)).Val() > 0 })
		}
		end()
		var got reply
		until(t, "the other gateway has it", func() bool {
			got = b.back(id + ":3")
			return got.status == http.StatusOK
		})
		b.checkWhole(b.numbered(strings.ReplaceAll(read+got.body, "id: "+id, "id: stream-1")), 1, 10, true)
	}
}

// An answer whose last event comes while the store is away, and whose worker closes once it
// is back, is told anew then: neither an event nor the store's return does it.
func TestSharedEndsAsStoreReturns(t *testing.T) {
	t.Parallel() // most of it is waiting
	share := shares(t, redistest.Start(t))
	closes := make(chan struct{})
	whole := well(t)
	a := inRealTime(t, share, func(n int, w http.ResponseWriter, r *http.Request, body string) {
		whole(n, w, r, body)
		<-closes
	})
	b := inRealTime(t, share, well(t))
	away := func(on bool) {
		k := a.relay.kept
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.shared.down = on; !on {
			for _, s := range k.streams {
				k.shared.againLocked(s)
			}
		}
	}
	away(true)
	resp, err := a.post(t.Context(), askUsage, names.Resumable, "1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	read := events(t, bufio.NewReader(resp.Body), 13) // ten tokens, the finish, the usage, [DONE]
	if !strings.HasSuffix(read, done) {
		t.Fatalf("not the end of it: %s", read)
	}
	away(false)
	close(closes)
	var got reply
	until(t, "the other gateway has it", func() bool {
		got = b.back("stream-1:3")
		return got.status == http.StatusOK
	})
	head := strings.Join(strings.SplitAfter(read, "\n\n")[:3], "")
	b.checkWhole(b.numbered(head+got.body), 1, 10, true)
}

// A ledger that is told in pieces is the ledger.
func TestGains(t *testing.T) {
	for _, whole := range []int{0, 3} {
		j := &job{led: ledger{stream: "s", plain: true}, r: &Relay{}}
		j.owner = &attempt{w: worker{id: "w1", mark: "m", fingerprint: "f"}, place: place{pool: "p", tier: 1, most: 7}}
		var steps stepper
		var rec record
		for i := range 6 {
			c := j.led.choice(i % 2)
			c.seen = true
			if i%2 == 0 {
				c.ids, c.text = append(c.ids, int32(i), int32(i+1)), c.text+3
			} else {
				c.said, c.text = append(c.said, "ab"...), c.text+2
			}
			j.led.tokens += 2
			j.n, j.moves, c.finished = i, i/2, i > 3
			rec.frames = append(rec.frames, frame{N: 7 + i, Gain: steps.next(j, i == 0 || i == whole)})
		}
		if err := rec.check(); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(rec.frames)
		if err != nil {
			t.Fatal(err)
		}
		var read record
		if err := json.Unmarshal(text, &read.frames); err != nil {
			t.Fatal(err)
		}
		got := &job{led: ledger{stream: "s", plain: true}}
		if err := read.restore(got); err != nil {
			t.Fatal(err)
		}
		j.led.events = 13
		if !reflect.DeepEqual(got.led, j.led) || got.n != 5 || got.moves != 2 || got.owner.w != j.owner.w || got.owner.place != j.owner.place {
			t.Errorf("ledger\n%+v, want\n%+v; job %+v", got.led, j.led, got.owner)
		}
	}
}

// FuzzRecord: whatever is stored, a record is refused or makes a ledger.
func FuzzRecord(f *testing.F) {
	for _, s := range []string{
		`[{"n":0,"event":"eA==","gain":{"whole":true,"origin":{"pool":"p"},"choices":[{"index":1,"ids":[1,2],"text":4}]}},{"n":1,"last":true}]`,
		`[{"n":1},{"n":3}]`, `[]`, `[{"gain":{"whole":true,"choices":[{"index":-1}]}}]`, `[{"gain":{"whole":true,"choices":[{"index":9999999,"text":-1}]}}]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var rec record
		if json.Unmarshal(data, &rec.frames) != nil || rec.check() != nil {
			return
		}
		j := &job{r: &Relay{}}
		if rec.restore(j) == nil && (len(j.led.choices) > mostChoices || j.led.events < 0) {
			t.Errorf("%s made %+v", data, j.led)
		}
	})
}

// What is sealed opens at its place, with its secret, and as it was, or not at all.
func TestSeal(t *testing.T) {
	a, err := newSealer("a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := newSealer("b")
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := a.seal("here", &openai.Event{Data: []byte("secret")})
	if err != nil || bytes.Contains(sealed, []byte("secret")) {
		t.Fatalf("%q, %v", sealed, err)
	}
	var v openai.Event
	if err := a.open("here", sealed, &v); err != nil || string(v.Data) != "secret" {
		t.Errorf("%+v, %v", v, err)
	}
	if a.open("there", sealed, &v) == nil || b.open("here", sealed, &v) == nil || a.open("here", sealed[:9], &v) == nil {
		t.Error("it opens anywhere")
	}
	sealed[len(sealed)-1] ^= 1
	if a.open("here", sealed, &v) == nil {
		t.Error("it opens when spoiled")
	}
}
