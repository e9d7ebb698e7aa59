package e2e

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

var fullResume = flag.Bool("resume-full", false, "all prompts and cuts of the resume tests, which takes a quarter of an hour")

const (
	// preface makes every prompt longer than a block of KV.
	preface      = "From a collection of short texts, each of them told in a calm and careful voice, without any hurry:\n\n"
	answerTokens = 90
	repeatLength = 16 // an answer that repeats so many tokens could hide a wrong splice
)

// run is an answer: what the client has in the end.
type run struct {
	ids    []int32
	text   string
	finish string
	tokens int // of usage
	// How it went on, for a continuation.
	mode               string
	restored, computed int
}

// add takes an event.
func (r *run) add(c chunk) {
	r.ids = append(r.ids, c.ids...)
	r.text += c.text
	if c.finish != "" {
		r.finish += c.finish
	}
	if c.mode != "" {
		r.mode, r.restored, r.computed = c.mode, c.restored, c.computed
	}
	if c.usage != nil {
		r.tokens = c.usage.CompletionTokens
	}
}

// rest reads a stream to its end.
func (r *run) rest(t testing.TB, s *reading) {
	t.Helper()
	defer s.close()
	for {
		c, err := s.next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("worker %s, after %d tokens: %v", s.p.id, len(r.ids), err)
		}
		r.add(c)
	}
}

// differs says how got is another answer than want, "" when it is the same.
func differs(got, want run) string {
	n := 0
	for n < min(len(got.ids), len(want.ids)) && got.ids[n] == want.ids[n] {
		n++
	}
	switch {
	case n < len(got.ids) || n < len(want.ids):
		return fmt.Sprintf("ids differ at token %d of %d and %d", n, len(got.ids), len(want.ids))
	case got.text != want.text:
		return fmt.Sprintf("text %q, want %q", got.text, want.text)
	case got.finish != want.finish:
		return fmt.Sprintf("finish %q, want %q", got.finish, want.finish)
	case got.tokens != want.tokens:
		return fmt.Sprintf("usage %d, want %d", got.tokens, want.tokens)
	}
	return ""
}

// repeats reports whether ids have a run of n tokens twice.
func repeats(ids []int32, n int) bool {
	seen := make(map[string]bool)
	for i := 0; i+n <= len(ids); i++ {
		key := fmt.Sprint(ids[i : i+n])
		if seen[key] {
			return true
		}
		seen[key] = true
	}
	return false
}

// question is one prompt with its sampling and its undisturbed answer.
type question struct {
	body map[string]any
	want run
}

// questions are n prompts, half of them greedy, whose undisturbed answer on p repeats
// nothing.
func questions(t testing.TB, p *process, n int) []question {
	t.Helper()
	raw, err := os.ReadFile("testdata/prompts.txt")
	if err != nil {
		t.Fatal(err)
	}
	var out []question
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	for i, line := range lines {
		if len(out) == n {
			break
		}
		body := map[string]any{"prompt": preface + line, "max_tokens": answerTokens, "temperature": 0, "repetition_penalty": 1.15, "ignore_eos": true}
		if len(out)%2 == 1 {
			maps.Copy(body, map[string]any{"temperature": 0.8, "repetition_penalty": 1, "seed": 1000 + i, "top_p": 0.95, "presence_penalty": 0.1})
		}
		q := question{body: body}
		// A salt of its own: the preface's KV from the prompt before would change the
		// shape of the batches that read this one.
		q.want.rest(t, p.post(body, map[string]any{"token_ids": true, "salt": fmt.Sprint("question ", i)}, "undisturbed"))
		if len(q.want.ids) != answerTokens {
			t.Fatalf("prompt %d: %d tokens", i, len(q.want.ids))
		}
		if repeats(q.want.ids, repeatLength) {
			t.Logf("prompt %d repeats itself and is left out", i)
			continue
		}
		out = append(out, q)
	}
	if len(out) < n {
		t.Fatalf("%d of %d prompts have answers that do not repeat themselves", len(out), n)
	}
	return out
}

// cutting is how a stream is cut.
type cutting struct {
	at    int // delivered tokens
	ahead int // how many more the worker had sent
	kill  bool
	ready func() // called before, nil for nothing to wait for
}

// cut starts a stream on p, reads it up to the cut, and stops or kills p. What it
// returns ends at an event: it holds at least c.at tokens.
func cut(t testing.TB, p *process, body, mesh map[string]any, stream string, c cutting) (delivered run, s *reading) {
	t.Helper()
	s = p.post(body, mesh, stream)
	seen := 0
	for seen < c.at+c.ahead {
		ch, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		if seen += len(ch.ids); len(delivered.ids) < c.at {
			delivered.add(ch)
		}
	}
	if c.ready != nil {
		c.ready()
	}
	if c.kill {
		p.kill()
	} else {
		p.signal(syscall.SIGSTOP)
	}
	return delivered, s
}

// goOn continues a stream on p and returns the whole answer.
func goOn(t testing.TB, p *process, body map[string]any, delivered run, stream, salt string) run {
	t.Helper()
	return splice(t, p, body, delivered, told{IDs: delivered.ids, Text: delivered.text}, stream, salt)
}

// splice continues on p a stream of which the client has what was delivered, after
// telling p what the relay believes that to be, and returns what the client has in
// the end.
func splice(t testing.TB, p *process, body map[string]any, delivered run, belief told, stream, salt string) run {
	t.Helper()
	return continued(t, p, body, delivered, resume(belief, stream, salt), stream)
}

// resume is the body's field kvmesh that continues a stream.
func resume(belief told, stream, salt string) map[string]any {
	return map[string]any{"token_ids": true, "salt": salt, "resume": map[string]any{"stream": stream, "attempt": 2, "choices": []any{
		map[string]any{"index": 0, "token_ids": belief.IDs, "text_bytes": len(belief.Text)},
	}}}
}

// continued reads the rest of a stream behind what was delivered.
func continued(t testing.TB, p *process, body map[string]any, delivered run, mesh map[string]any, stream string) run {
	t.Helper()
	whole := delivered
	whole.ids = slices.Clone(delivered.ids)
	whole.rest(t, p.post(body, mesh, stream))
	return whole
}

// wrongSplices continues a stream after beliefs of the relay that are a token or a byte
// off: the comparison that the right splice passes must see each of them.
func wrongSplices(t *testing.T, p *process, q question, delivered run, salt string) {
	t.Helper()
	n := len(delivered.ids)
	short, all := delivered.ids[:n-1], told{IDs: delivered.ids, Text: delivered.text}
	cases := map[string]struct {
		client run
		belief told
	}{
		"a token is lost":     {run{ids: short, text: p.text(short)}, all},
		"a token comes twice": {delivered, told{IDs: short, Text: p.text(short)}},
		"a byte comes twice":  {delivered, told{IDs: delivered.ids, Text: strings.Repeat("x", max(len(delivered.text)-1, 0))}},
	}
	for what, c := range cases {
		if len(c.client.text) == 0 && what == "a byte comes twice" {
			continue // none was delivered
		}
		got := splice(t, p, q.body, c.client, c.belief, fmt.Sprintf("stream-%s, %s", salt, what), salt)
		if why := differs(got, q.want); why == "" {
			t.Errorf("cut at %d: %s, and nobody notices", n, what)
		} else {
			t.Logf("cut at %d: %s: %s", n, what, why)
		}
	}
}

// kvDir is a directory in shared memory that goes away with the test.
func kvDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvmesh-test-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "kv")
}

// exactly is the processes of TestResumeExact.
type exactly struct {
	*testing.T
	kv       []string // flags
	one, two *process
	done     int
	caught   map[int]int // how many continuations had to compute how many tokens
}

// try cuts a question's stream on the first worker and continues it on the second. It
// returns what the client had by then, and the stream's salt.
func (x *exactly) try(q question, c cutting) (delivered run, salt string) {
	x.Helper()
	x.done++
	salt = fmt.Sprint("salt ", x.done) // blocks of the cuts before would change the first run
	name := fmt.Sprintf("continuation %d, cut at %d with %d ahead", x.done, c.at, c.ahead)
	if c.at+c.ahead < 8 { // the prompt's block may still be on its way, and then nothing could be restored
		const blocks = "kvmesh_kv_blocks_total"
		before := x.one.metric(blocks)
		c.ready = func() {
			testmesh.Eventually(x, "a block is published", time.Minute, func() bool { return x.one.metric(blocks) > before })
		}
	}
	delivered, s := cut(x, x.one, q.body, map[string]any{"token_ids": true, "salt": salt}, "stream-"+salt, c)
	got := goOn(x, x.two, q.body, delivered, "stream-"+salt, salt)
	if why := differs(got, q.want); why != "" {
		x.Errorf("%s: %s (%s, restored %d, computed %d)", name, why, got.mode, got.restored, got.computed)
	}
	if got.mode != "exact" || got.restored < 64 || got.computed >= 64 {
		x.Errorf("%s: went on as %q with %d tokens restored and %d computed, want exact with a block at least, and less than one computed",
			name, got.mode, got.restored, got.computed)
	}
	x.caught[got.computed]++
	if c.kill {
		s.close()
		x.one = startProcess(x, "one", x.kv...)
		return delivered, salt
	}
	x.one.signal(syscall.SIGCONT)
	s.close()
	x.one.idle()
	return delivered, salt
}

// missing is the least number of tokens up to 15 that no continuation had to compute,
// 0 when there is none.
func (x *exactly) missing() int {
	for n := 1; n <= 15; n++ {
		if x.caught[n] == 0 {
			return n
		}
	}
	return 0
}

// TestResumeExact cuts streams on one worker and continues them on another, from the
// KV that the first had published: ids and bytes are those of the undisturbed run,
// every time. The tokens that have to be computed are those behind the last
// checkpoint: some number from 1 to 15, and in the full run each of them.
func TestResumeExact(t *testing.T) {
	prompts, cuts := 2, 3
	if *fullResume {
		prompts, cuts = 20, 5
	}
	kv := []string{"--kv-dir", kvDir(t), "--kv-limit", "2147483648", "--checkpoint-interval", "16"}
	alone := startProcess(t, "alone")
	x := &exactly{T: t, kv: kv, two: startProcess(t, "two", kv...), one: startProcess(t, "one", kv...), caught: make(map[int]int)}
	qs := questions(t, alone, prompts)
	alone.kill()
	rnd := rand.New(rand.NewPCG(1, 2))
	for i, q := range qs {
		for k := range cuts {
			c := cutting{at: 1 + rnd.IntN(answerTokens-2)}
			if k < 3 && (i%2 == 1 || !*fullResume) {
				c.ahead = []int{1, 3, 70}[k]
				c.at = min(c.at, answerTokens-c.ahead-2)
			}
			c.kill = k == cuts-1 && (i%4 == 0)
			delivered, salt := x.try(q, c)
			if k == 0 && (i == 0 || *fullResume) {
				wrongSplices(t, x.two, q, delivered, salt)
			}
		}
	}
	// What chance has left out: a cut one token further leaves one more, now and then.
	for at := 20; *fullResume && at < answerTokens-10 && x.missing() > 0; at++ {
		x.try(qs[0], cutting{at: at})
	}
	hits := x.two.metric("kvmesh_kv_store_hits_total")
	t.Logf("computed again, tokens: times: %v; %v blocks restored", x.caught, hits)
	if hits < float64(x.done) {
		t.Errorf("%v blocks were restored in %d continuations", hits, x.done)
	}
	some := 0
	for n := 2; n <= 15; n++ {
		some += x.caught[n]
	}
	if n := x.missing(); n > 0 && *fullResume || some == 0 {
		t.Errorf("no cut left %d tokens to compute, of 1 to 15: %v", n, x.caught)
	}
}

// fresh is what p says after a prompt of ids, its KV kept nowhere.
func fresh(t testing.TB, p *process, ids []int32, n int) run {
	t.Helper()
	var r run
	body := map[string]any{"prompt": ids, "max_tokens": n, "temperature": 0, "repetition_penalty": 1.15, "ignore_eos": true}
	r.rest(t, p.post(body, map[string]any{"token_ids": true, "salt": t.Name()}, "fresh"))
	return r
}

// blockFiles are the stored blocks.
func blockFiles(t testing.TB, dir string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(dir, "models"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if st, err := d.Info(); err == nil && st.Size() > 512<<10 {
				files = append(files, path)
			}
		}
		return nil // a file may go while we look
	})
	if err != nil || len(files) == 0 {
		t.Fatalf("%d stored blocks in %s, %v", len(files), dir, err)
	}
	return files
}

// loss is a way in which stored KV is of no use.
type loss struct {
	name   string
	refuse string // reason that is counted, "" = none
	salt   string // with which the stream goes on, "" = its own
	spoil  func(path string) error
}

// TestResumeWithoutKV takes the stored KV away, or spoils it, between the cut and the
// continuation: nothing is lost and nothing repeated, and what follows is what a fresh
// run says after prompt and delivered tokens.
func TestResumeWithoutKV(t *testing.T) {
	dir := kvDir(t)
	kv := []string{"--kv-dir", dir, "--kv-limit", "2147483648"}
	one, two := startProcess(t, "one", kv...), startProcess(t, "two", kv...)
	removed := loss{name: "removed", spoil: os.Remove}
	if !*fullResume {
		q := questions(t, two, 1)[0]
		withoutKV(t, dir, one, two, q, cutting{at: 41}, removed)
		withoutKV(t, dir, one, two, q, cutting{at: 41}, loss{name: "another tenant's", salt: "somebody else", spoil: func(string) error { return nil }})
		withoutKV(t, dir, one, two, q, cutting{at: 41}, flippedState())
		return
	}
	qs := questions(t, two, 8)
	for _, l := range []loss{
		{name: "another tenant's", salt: "somebody else", spoil: func(string) error { return nil }},
		{name: "truncated", refuse: "torn", spoil: func(path string) error { return os.Truncate(path, 300<<10) }},
		flippedState(),
		{name: "a bit flipped in the header", refuse: "checksum", spoil: func(path string) error { return flip(path, 180) }},
	} {
		withoutKV(t, dir, one, two, qs[0], cutting{at: 41}, l)
	}
	bare := startProcess(t, "bare") // it has no store
	rnd := rand.New(rand.NewPCG(3, 4))
	for i, q := range qs {
		for range 2 {
			l, c := removed, cutting{at: 8 + rnd.IntN(answerTokens-14), ahead: rnd.IntN(4)}
			l.name = fmt.Sprintf("removed, prompt %d", i)
			withoutKV(t, dir, one, two, q, c, l, bare)
		}
	}
}

func flippedState() loss {
	return loss{name: "a bit flipped in the state", refuse: "checksum", spoil: func(path string) error { return flip(path, 400<<10) }}
}

// withoutKV cuts a stream on one, has its KV spoiled, and continues it on two. A
// sampled answer, whose random numbers depend on how many tokens were delivered, is
// compared with its continuation on bare, which computes all of it.
func withoutKV(t *testing.T, dir string, one, two *process, q question, c cutting, l loss, bare ...*process) {
	t.Run(fmt.Sprintf("%s at %d", l.name, c.at), func(t *testing.T) {
		own := "own salt of " + t.Name()
		delivered, s := cut(t, one, q.body, map[string]any{"token_ids": true, "salt": own}, "stream-"+own, c)
		defer func() {
			one.signal(syscall.SIGCONT)
			s.close()
			one.idle()
		}()
		for _, path := range blockFiles(t, dir) {
			if err := l.spoil(path); err != nil {
				t.Fatal(err)
			}
		}
		before := two.refused(l.refuse)
		got := goOn(t, two, q.body, delivered, "stream-"+own, cmp.Or(l.salt, own))
		if got.mode != "replayed" || got.restored != 0 {
			t.Errorf("went on as %q with %d tokens restored, want replayed", got.mode, got.restored)
		}
		if n := two.refused(l.refuse) - before; l.refuse != "" && n == 0 {
			t.Errorf("no refusal for reason %s is counted", l.refuse)
		}
		var want run
		if k := len(delivered.ids); q.body["temperature"] == 0 {
			rest := fresh(t, two, slices.Concat(two.prompt(q.body), delivered.ids), answerTokens-k)
			want = run{ids: slices.Concat(delivered.ids, rest.ids), text: delivered.text + rest.text}
		} else {
			want = goOn(t, bare[0], q.body, delivered, "stream-"+own, own)
		}
		want.tokens, want.finish = answerTokens, "length"
		if why := differs(got, want); why != "" || !slices.Equal(got.ids[:len(delivered.ids)], delivered.ids) {
			t.Errorf("after %d tokens %s\n%v %q\nwant %v %q", len(delivered.ids), why, got.ids, got.text, want.ids, want.text)
		}
	})
}

// refused is how often stored KV was refused for a reason, by store or keeper.
func (p *process) refused(reason string) float64 {
	return p.metric(`kvmesh_kv_refused_total{reason="`+reason) + p.metric(`kvmesh_kv_store_refused_total{reason="`+reason)
}

// flip changes one bit of a file.
func flip(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return errors.Join(err, f.Close())
	}
	b[0] ^= 4
	_, err = f.WriteAt(b[:], at)
	return errors.Join(err, f.Close())
}
