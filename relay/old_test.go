package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
)

// forever is a stream that ends with its client.
const forever = `{"model":"m","prompt":"p","stream":true,"max_tokens":1000000}`

// open begins a stream that flows until stop.
func (m *mesh) open(id string) (stop func()) {
	m.t.Helper()
	ctx, stop := context.WithCancel(m.t.(*testing.T).Context())
	resp, err := m.post(ctx, forever, names.Stream, id)
	if err != nil {
		m.t.Fatal(err)
	}
	events(m.t, bufio.NewReader(resp.Body), 1)
	return stop
}

// operator asks what an operator does.
func (m *mesh) operator(method, path string) *httptest.ResponseRecorder {
	m.t.Helper()
	rec := httptest.NewRecorder()
	m.relay.StreamsHandler().ServeHTTP(rec, httptest.NewRequest(method, path, nil))
	return rec
}

func (m *mesh) listed() (l fleet.StreamList) {
	m.t.Helper()
	rec := m.operator(http.MethodGet, "/v1/streams")
	if err := json.Unmarshal(rec.Body.Bytes(), &l); err != nil || rec.Code != http.StatusOK {
		m.t.Fatalf("status %d, %v: %s", rec.Code, err, rec.Body)
	}
	return l
}

// where is "stream at gateway" of a list, sorted, with the meshes for the gateways' names.
func where(l fleet.StreamList, gateways ...*mesh) []string {
	var out []string
	for _, s := range l.Streams {
		i := slices.IndexFunc(gateways, func(m *mesh) bool { return m.relay.name == s.Gateway })
		out = append(out, fmt.Sprintf("%s at %d", s.ID, i))
	}
	slices.Sort(out)
	return out
}

// The last of several gateways in a row shows and moves what those before it carry, and
// what they have counted outlives them.
func TestOldGatewaysStreams(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, nil)
	stopA := a.open("s/1") // a client may choose its id
	b := inRow(t, socket, nil)
	a.replace()
	stopB := b.open("s2")
	c := inRow(t, socket, nil)
	b.replace()
	c.open("s3")
	c.relay.old.limit = time.Minute

	l := c.listed()
	if diff := cmp.Diff([]string{"s/1 at 0", "s2 at 1", "s3 at 2"}, where(l, a, b, c)); diff != "" {
		t.Errorf("streams (-want +got):\n%s", diff)
	}
	if len(l.Gateways) != 3 || l.Gateways[0] != c.relay.name {
		t.Errorf("gateways %v, want three, and first %s", l.Gateways, c.relay.name)
	}

	for path, want := range map[string]int{
		url.PathEscape("s/1") + "/migrate?to=w3": http.StatusNoContent,
		"s2/migrate":                             http.StatusNoContent,
		"s2/migrate?to=nobody":                   http.StatusConflict,
		"s4/migrate":                             http.StatusNotFound,
	} {
		if rec := c.operator(http.MethodPost, "/v1/streams/"+path); rec.Code != want || want == http.StatusConflict && !strings.Contains(rec.Body.String(), "stays where it is: ") {
			t.Errorf("%s: status %d, want %d: %s", path, rec.Code, want, rec.Body)
		}
	}
	until(t, "the streams have moved", func() bool {
		moved := map[string]int{}
		for _, s := range c.listed().Streams {
			if moved[s.ID] = len(s.Moves); s.ID == "s/1" && s.Worker != "w3" {
				return false
			}
		}
		return moved["s/1"] == 1 && moved["s2"] == 1 && moved["s3"] == 0
	})

	broken := func(m *mesh) int64 { return c.listed().AttemptsAt(m.relay.name, "w2").Broken }
	a.relay.tallies.of("w2").count(failed)
	b.relay.tallies.of("w2").count(failed)
	b.relay.tallies.of("w2").count(failed)
	if broken(a) != 1 || broken(b) != 2 || broken(c) != 0 {
		t.Errorf("%d, %d and %d broken, want 1, 2 and 0", broken(a), broken(b), broken(c))
	}
	b.relay.tallies.of("w2").count(absent) // nobody has asked since
	stopB()
	<-b.done
	if got := where(c.listed(), a, b, c); len(got) != 2 || broken(b) != 3 || len(c.listed().Gateways) != 3 {
		t.Errorf("after the end of one: %v, %d broken there", got, broken(b))
	}
	stopA()
	<-a.done
	if got := where(c.listed(), a, b, c); len(got) != 1 || broken(a) != 1 {
		t.Errorf("after the end of both: %v, %d broken at the first", got, broken(a))
	}
	if left, _ := filepath.Glob(socket + ".*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// unanswered listens beside a relay's socket as an old gateway that is stopped does: the
// kernel takes connections, and nobody ever reads.
func unanswered(t *testing.T, socket, name string) (path string) {
	t.Helper()
	path = socket + oldSocket + name
	lis, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	return path
}

// Whatever is the matter with one old gateway, the list has what the others carry.
func TestOldGatewayInTrouble(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, nil)
	a.open("s1")
	b := inRow(t, socket, nil)
	a.replace()
	b.open("s2")
	b.relay.old.limit = 5 * time.Second

	stopped := unanswered(t, socket, "stopped")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket + oldSocket + "dead", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close() // its file stays, as after SIGKILL
	odd := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, `{"streams":[{"id":"s`) }))
	old := httptest.NewUnstartedServer(http.NotFoundHandler()) // of a version that cannot say
	for name, srv := range map[string]*httptest.Server{"odd": odd, "version": old} {
		if srv.Listener, err = net.Listen("unix", socket+oldSocket+name); err != nil {
			t.Fatal(err)
		}
		srv.Start()
		defer srv.Close()
	}

	begin := time.Now()
	l := b.listed()
	if diff := cmp.Diff([]string{"s1 at 0", "s2 at 1"}, where(l, a, b)); diff != "" {
		t.Errorf("streams (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(dead.Addr().String()); !os.IsNotExist(err) {
		t.Errorf("the socket of a dead gateway is still there: %v", err)
	}
	if !b.relay.old.isSilent(stopped, begin) || b.relay.old.isSilent(stopped, time.Now().Add(time.Hour)) || b.relay.old.isSilent(socket+oldSocket+a.relay.name, begin) {
		t.Error("the one that is stopped, and only that one, is left alone for a while")
	}
	if rec := b.operator(http.MethodPost, "/v1/streams/s1/migrate"); rec.Code != http.StatusNoContent {
		t.Errorf("migrate: status %d: %s", rec.Code, rec.Body)
	}
	until(t, "the stream has moved", func() bool { return len(a.relay.Streams(begin)[0].Moves) > 0 })
	if rec := b.operator(http.MethodPost, "/v1/streams/s3/migrate"); rec.Code != http.StatusServiceUnavailable {
		t.Errorf("migrate what the one that is stopped may have: status %d: %s", rec.Code, rec.Body)
	}
}

// One that did not answer is not asked again for a while, so it holds nothing up.
func TestSilentGatewayIsLeftAlone(t *testing.T) {
	t.Parallel() // most of it is waiting
	socket := filepath.Join(t.TempDir(), "r")
	a := inRow(t, socket, nil)
	path := socket + oldSocket + "stopped"
	lis, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan bool, 1)
	go func() {
		c, err := lis.Accept()
		if asked <- err == nil; err == nil {
			_ = c.Close()
		}
	}()
	a.relay.old.silence(path, time.Now().Add(time.Hour))
	a.listed()
	a.operator(http.MethodPost, "/v1/streams/s/migrate")
	if _ = lis.Close(); <-asked {
		t.Error("it was asked")
	}
}

// Without a secret nothing is handed over, and the old one's streams are listed all the
// same.
func TestOldGatewayWithoutSecret(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "r")
	mk := func() *mesh { return newMesh(t, func(c *Config) { c.Socket = socket }, noEgress) }
	old, next := mk(), mk()
	next.relay.old.limit = time.Minute
	old.relay.live.add(&job{r: old.relay, in: &http.Request{Header: http.Header{}}, start: time.Now(), led: ledger{stream: "s"}})
	if err := old.relay.Replaced(); err != nil {
		t.Fatal(err)
	}
	defer old.relay.kept.closeOld()
	if got := where(next.listed(), old, next); !slices.Equal(got, []string{"s at 0"}) || old.relay.kept.give != nil {
		t.Errorf("streams: %v", got)
	}
	files, _ := filepath.Glob(socket + oldSocket + "*")
	if len(files) != 1 {
		t.Fatalf("sockets: %v", files)
	}
	if st, err := os.Stat(files[0]); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, mode %v", err, st.Mode())
	}
}

func TestMergeLists(t *testing.T) {
	at := func(gateway string, ids ...string) (l fleet.StreamList) {
		l.Gateways = []string{gateway}
		for _, id := range ids {
			l.Streams = append(l.Streams, fleet.StreamView{ID: id, Gateway: gateway})
		}
		l.Attempts = []fleet.AttemptView{{Gateway: gateway, Worker: "w1", OK: int64(len(ids))}, {Gateway: gateway, Worker: "w2"}}
		return l
	}
	l := at("new", "a", "b", "")
	merge(&l, at("old", "b", "c", "")) // b is handed over at the moment, and two have no id
	merge(&l, at("old", "d"))          // what it said before
	want := fleet.StreamList{
		Gateways: []string{"new", "old"},
		Streams: []fleet.StreamView{
			{ID: "a", Gateway: "new"}, {ID: "b", Gateway: "new"}, {Gateway: "new"}, {ID: "c", Gateway: "old"}, {Gateway: "old"}, {ID: "d", Gateway: "old"},
		},
		Attempts: []fleet.AttemptView{
			{Gateway: "new", Worker: "w1", OK: 3}, {Gateway: "new", Worker: "w2"}, {Gateway: "old", Worker: "w1", OK: 3}, {Gateway: "old", Worker: "w2"},
		},
	}
	if diff := cmp.Diff(want, l); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What a gateway counted that has ended is told for a while, and not for ever.
func TestLastWordsPass(t *testing.T) {
	var p predecessors
	now := time.Now()
	for i := range 3 {
		p.hear(lastWord{now.Add(time.Duration(i) * time.Second), []string{fmt.Sprint(i)}, []fleet.AttemptView{{Gateway: fmt.Sprint(i), OK: 1}}})
	}
	for after, want := range map[time.Duration]int{-time.Second: 3, 1500 * time.Millisecond: 1, time.Hour: 0} {
		q := predecessors{words: slices.Clone(p.words)}
		var l fleet.StreamList
		if q.tell(now.Add(after), &l); len(l.Gateways) != want || len(l.Attempts) != want || len(q.words) != want {
			t.Errorf("after %v: %+v, want %d", after, l, want)
		}
	}
}
