package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache/kvevents"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// leak looks for what only clients may see: prompts, answers, and their tokens.
type leak struct {
	digits *regexp.Regexp
	texts  map[string]string // what is looked for, and what it is a part of
	ids    map[string]string // likewise, tokens with blanks between them
}

func newLeak() *leak {
	return &leak{digits: regexp.MustCompile(`[^0-9]+`), texts: map[string]string{}, ids: map[string]string{}}
}

// word returns a word that nobody has ever said, to be a part of a prompt, and looks for it:
// as it is, and as it is written where bytes are written as text.
func (l *leak) word(what string) string {
	w := "marker" + strings.ToLower(rand.Text())
	l.texts[w] = what
	l.texts[strings.ToUpper(w)] = what
	l.texts[hex.EncodeToString([]byte(w))] = what
	for ahead := range 3 {
		// What stands before it decides how base64 cuts it; the first and the last quantum are
		// not its own.
		whole := base64.RawStdEncoding.EncodeToString(append(make([]byte, ahead), w...))
		l.texts[whole[4:len(whole)-4]] = what
	}
	return w
}

// window and step are how long the parts of an answer are that are looked for, in bytes, and
// how far apart they begin; shortest is how many tokens in a row are a list of tokens.
const (
	window   = 24
	step     = 8
	shortest = 6
)

// text looks for all parts of an answer.
func (l *leak) text(what, answer string) {
	for at := 0; at+window <= len(answer); at += step {
		if part := answer[at : at+window]; strings.Trim(part, part[:1]) != "" {
			l.texts[part] = what
		}
	}
}

// tokens looks for a list of tokens, and its parts.
func (l *leak) tokens(what string, ids []int32) {
	for at := 0; at+shortest <= len(ids); at++ {
		part := ids[at : at+shortest]
		if part[0] > 9 && part[1] > 9 && part[0] != part[1] { // else it may be any numbers
			l.ids[strings.Trim(fmt.Sprint(part), "[]")] = what
		}
	}
}

// find returns what of all that is in data.
func (l *leak) find(data []byte) (found []string) {
	for part, what := range l.texts {
		if bytes.Contains(data, []byte(part)) {
			found = append(found, fmt.Sprintf("%s: %q", what, part))
		}
	}
	numbers := " " + l.digits.ReplaceAllString(string(data), " ") + " "
	for part, what := range l.ids {
		if strings.Contains(numbers, " "+part+" ") {
			found = append(found, fmt.Sprintf("%s: tokens %s", what, part))
		}
	}
	return found
}

// TestLeakFinds: what the test of leaks looks for is found in all the forms that it may have,
// and nothing else is.
func TestLeakFinds(t *testing.T) {
	l := newLeak()
	w := l.word("a word")
	answer := "An answer that is long enough to be found, and é beside it."
	l.text("an answer", answer)
	ids := []int32{1017, 40, 262, 262, 9, 77, 1200, 31}
	l.tokens("tokens", ids)
	for _, in := range []string{
		"x" + w + "y", strings.ToUpper(w), hex.EncodeToString([]byte(w)), "…" + answer[:40], answer[19:], fmt.Sprint(ids), fmt.Sprintf("%#v", ids),
		`{"ids":[1017,40,262,262,9,77]}`, "1017 40 262 262 9 77", "1017;40;262;262;9;77;",
		base64.StdEncoding.EncodeToString([]byte("a" + w + "b")), base64.StdEncoding.EncodeToString([]byte("aab" + w)), base64.RawURLEncoding.EncodeToString([]byte("cd" + w + w)),
	} {
		if len(l.find([]byte(in))) == 0 {
			t.Errorf("not found in %q", in)
		}
	}
	for _, in := range []string{"", "marker", w[:20], answer[:20], "1017, 40, 262, 262, 9", "2017 40 262 262 9 770", "An answer"} {
		if found := l.find([]byte(in)); len(found) > 0 {
			t.Errorf("%v in %q", found, in)
		}
	}
}

// telling is a KV node with a worker, outside of a mesh, and what it has told of its blocks.
type telling struct {
	node    *kvNode
	worker  *process
	address string

	mu   sync.Mutex
	told bytes.Buffer
}

// events is what it has told so far.
func (n *telling) events() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return bytes.Clone(n.told.Bytes())
}

// followed starts a KV node that tells of its blocks, with more flags, and a worker that
// answers a secret prompt, and follows what the node tells.
func (s *secretive) followed(args ...string) *telling {
	s.Helper()
	n := &telling{address: "tcp://" + freeAddr(s.T)}
	n.node = startNode(s.T, append([]string{"--events", n.address, "--log-level", "debug"}, args...)...)
	n.worker = simProcess(s.T, "telling", "--kv-node", n.node.dir, "--log-level", "debug")
	sub, err := kvevents.NewSubscriber(kvevents.SubscriberConfig{Address: n.address, OnReset: func() {}, OnBatch: func(b kvevents.Batch) {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, e := range b.Events {
			fmt.Fprintf(&n.told, "%v %+v\n", e.Kind, e)
		}
	}})
	if err != nil {
		s.Fatal(err)
	}
	go sub.Run(s.Context())
	prompt := strings.Repeat("So far nothing has happened here. ", 20) + "Tell nobody of " + s.word + ", and go on"
	testmesh.Eventually(s, "the node tells of its blocks", time.Minute, func() bool { // a busy machine may make it late, and then nothing is stored
		var answer run
		answer.rest(s, n.worker.post(map[string]any{"prompt": prompt, "max_tokens": 80, "ignore_eos": true}, map[string]any{"token_ids": true}, "telling"))
		s.leak.text("an answer outside of the mesh", answer.text)
		s.leak.tokens("an answer outside of the mesh", answer.ids)
		return len(n.events()) > 0
	})
	s.pages = append(s.pages, n.node.metrics, n.worker.base+"/metrics", n.worker.base+"/health")
	return n
}
