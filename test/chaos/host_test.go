package chaos

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// site is where a worker runs that is not on the mesh's machine, and its line.
type site struct {
	command           func(name string, args ...string) *exec.Cmd
	listen, advertise string
	api               string // the control plane, as it is seen from there
	troubles          []*trouble
}

// trouble is what can happen to a line, and what came of it. One goroutine runs it.
type trouble struct {
	name       string
	begin, end func()
	// hits is what it did since the start, in this unit.
	hits func() int64
	unit string

	times   int
	lasted  time.Duration
	answers int   // that were under way there when it began or before it ended
	met     int64 // hits while there were such
}

// run has the trouble happen for a time; under are the answers that are under way there.
func (tr *trouble) run(length time.Duration, under func() []string) {
	ids := under()
	before, begin := tr.hits(), time.Now()
	tr.begin()
	time.Sleep(length)
	ids = append(ids, under()...)
	tr.end()
	tr.times++
	tr.lasted += time.Since(begin)
	if len(ids) > 0 {
		slices.Sort(ids)
		tr.answers += len(slices.Compact(ids))
		tr.met += tr.hits() - before
	}
}

// What a trouble has to have met for it to be a fault of the test that nothing came of it:
// so many answers, which send all the time; or so many seconds, for health is asked for all
// the time. And it is one that no answer met it when it happened so often. Less often proves
// nothing: the worker may have none, for it was just out of service.
const (
	manyAnswers = 5
	longEnough  = 5 * time.Second
	oftenEnough = 8
)

// vacuous reports whether nothing came of a trouble of which something had to.
func (tr *trouble) vacuous() bool {
	return tr.answers >= manyAnswers && tr.met == 0 || tr.lasted >= longEnough && tr.hits() == 0 || tr.times >= oftenEnough && tr.answers == 0
}

// TestVacuous: trouble that did nothing is noticed, and such as did something, or was too
// short to, passes.
func TestVacuous(t *testing.T) {
	for name, tt := range map[string]struct {
		length        time.Duration
		times, under  int
		works, failed bool
	}{
		"works":                 {longEnough / 4, 10, 2, true, false},
		"short":                 {longEnough / 4, 2, 0, false, false},
		"nothing met":           {longEnough / 4, 5, 0, false, true},
		"no answer met":         {longEnough / 20, 9, 0, true, true},
		"nothing of answers":    {longEnough / 20, 3, 2, false, true},
		"few answers are short": {longEnough / 20, 1, 2, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, whole := int64(0), true
				tr := &trouble{begin: func() { whole = false }, end: func() { whole = true }, hits: func() int64 { return n }}
				for i := range tt.times {
					tr.run(tt.length, func() (ids []string) {
						if !whole && tt.works {
							n++
						}
						for k := range tt.under {
							ids = append(ids, fmt.Sprintf("%d-%d", i, k))
						}
						return ids
					})
				}
				if !whole || tr.answers != tt.times*tt.under || tr.times != tt.times || tr.lasted != time.Duration(tt.times)*tt.length {
					t.Errorf("%+v; taken back: %v", tr, whole)
				}
				if got := tr.vacuous(); got != tt.failed {
					t.Errorf("vacuous: %v, want %v", got, tt.failed)
				}
			})
		})
	}
}

// report says what the troubles of lines met, which is not to be nothing.
func (c *chaos) report() {
	c.t.Helper()
	for _, id := range []string{"far-1", "far-2"} {
		for _, tr := range c.lines[id] {
			c.t.Logf("%s: line %s %d times, %.1f s in all; with %d answers under way there: %d %s",
				id, tr.name, tr.times, tr.lasted.Seconds(), tr.answers, tr.met, tr.unit)
			if tr.vacuous() {
				c.t.Errorf("%s: its line was %s, and nothing came of that", id, tr.name)
			}
		}
	}
}

// proxied is this machine with a proxy as a line.
func (c *chaos) proxied() site {
	c.t.Helper()
	at := site{command: exec.Command, listen: freeAddr(c.t), api: c.m.API}
	l := newLink(c.t, "127.0.0.1:0", at.listen)
	at.advertise, at.troubles = l.lis.Addr().String(), l.troubles()
	return at
}

// elsewhere is a host of its own, whose line is a wire, or one more that is proxied where
// there is none.
func (c *chaos) elsewhere() site {
	c.t.Helper()
	h, addrs, troubles, err := wired(c.t)
	if errors.Is(err, testmesh.ErrNoHosts) {
		c.t.Logf("far-2 is behind a proxy, too, and its line never slow or lossy: %v", err)
		return c.proxied()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	at := site{command: h.Command, listen: addrs[1] + ":8001", advertise: addrs[1] + ":8001", troubles: troubles}
	at.api = "http://" + newLink(c.t, addrs[0]+":0", strings.TrimPrefix(c.m.API, "http://")).lis.Addr().String()
	return at
}

// freeAddr is an address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	return lis.Addr().String()
}
