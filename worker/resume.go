package worker

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// caller is who sent a request, as far as the worker cares: the relay, or somebody
// who may not speak of streams.
type caller struct {
	relay   bool
	stream  string // id of the stream, of the relay's requests only
	attempt int    // likewise, 0 = not said

	priority int  // of the request, 0 = ordinary
	trusted  bool // the body may say a priority, too
	misrated bool // the header of somebody else than the relay says no number

	sim string // header names.Sim, of anybody's
}

// caller reads and checks the headers of a request.
func (s *Server) caller(r *http.Request) caller {
	// Hashes have equal lengths, so the comparison takes as long for every guess.
	c := caller{trusted: s.cfg.TrustPriority, sim: r.Header.Get(names.Sim)}
	got, want := sha256.Sum256([]byte(r.Header.Get(names.Relay))), sha256.Sum256([]byte(s.cfg.RelaySecret))
	c.relay = s.cfg.RelaySecret != "" && subtle.ConstantTimeCompare(got[:], want[:]) == 1
	if value := r.Header.Get(names.Priority); value != "" && (c.relay || c.trusted) {
		c.trusted = false // the header is the mesh's word
		if n, err := strconv.ParseInt(value, 10, 32); err == nil {
			c.priority = int(n)
		} else {
			c.misrated = !c.relay // the relay's own is no client's fault
		}
	}
	if !c.relay {
		return c
	}
	c.stream = r.Header.Get(names.Stream)
	if n, err := strconv.Atoi(r.Header.Get(names.Attempt)); err == nil && n > 0 {
		c.attempt = n
	}
	return c
}

// rank is the priority of a request. vLLM's field counts the other way round: the
// lower number goes first.
func (c caller) rank(req *openai.Request) (int, error) {
	if c.misrated {
		return 0, openai.Errorf(http.StatusBadRequest, "Invalid header '%s': it must be an integer of 32 bits.", names.Priority)
	}
	raw := req.Raw("priority")
	if !c.trusted || raw == nil {
		return c.priority, nil
	}
	n, err := strconv.ParseInt(string(raw), 10, 32)
	if err != nil {
		return 0, openai.Invalid("priority", "Invalid 'priority': it must be an integer of 32 bits.")
	}
	return int(-n), nil
}

// meshField is the body field "kvmesh" of the relay's requests. Fields it does not
// know pass: a relay may be newer than a worker.
type meshField struct {
	// TokenIDs asks for token_ids in every chunk of the stream.
	TokenIDs bool `json:"token_ids"`
	// Salt is the tenant's, see KVStream.
	Salt   string       `json:"salt"`
	Resume *resumeField `json:"resume"`
	// KVWithinMS is KVStream.Within in milliseconds.
	KVWithinMS int64 `json:"kv_within_ms"`
}

// readMesh decodes the field.
func readMesh(raw []byte) (f meshField, bad *openai.Error) {
	if bad = openai.DecodeObject(raw, openai.ReservedField, &f); bad == nil {
		bad = openai.RefuseNulls(raw, openai.ReservedField)
	}
	return f, bad
}

// kvWithin is the limit of a look-up, 0 for none of the route's.
func (f meshField) kvWithin() time.Duration {
	return time.Duration(min(max(f.KVWithinMS, 0), math.MaxInt32)) * time.Millisecond
}

// resumeField says what a stream has delivered so far.
type resumeField struct {
	Stream  string          `json:"stream"`
	Attempt int             `json:"attempt"`
	Choices []resumedChoice `json:"choices"`
}

// resumedChoice is what the client has of one choice: its tokens, and of their text,
// echo included, the first TextBytes bytes; or, where nobody knows its tokens, its Text.
type resumedChoice struct {
	Index     int     `json:"index"`
	TokenIDs  []int32 `json:"token_ids"`
	TextBytes int     `json:"text_bytes"`
	Text      string  `json:"text"`
}

// join makes a generation part of a stream: it reads what the relay says, continues
// what was delivered, and has the KV kept.
func (s *Server) join(g *generation, req *openai.Request, from caller) error {
	var field meshField
	if raw := req.Raw(openai.ReservedField); raw != nil {
		if !from.relay {
			return openai.Reserved()
		}
		var bad *openai.Error
		if field, bad = readMesh(raw); bad != nil {
			return bad
		}
	}
	priority, err := from.rank(req)
	if err != nil {
		return err
	}
	stream, attempt := from.stream, from.attempt
	if r := field.Resume; r != nil {
		if r.Stream == "" || r.Attempt < 1 {
			return openai.Invalid("kvmesh.resume", "Invalid 'kvmesh.resume': a stream and an attempt of at least 1 are needed.")
		}
		stream, attempt = r.Stream, r.Attempt
	}
	if req.Seed == nil && stream != "" {
		// Every worker that carries the stream must draw the same numbers.
		for _, c := range g.choices {
			c.params.Seed = streamSeed(stream)
		}
	}
	if r := field.Resume; r != nil {
		for _, rc := range r.Choices {
			if err := g.resume(rc); err != nil {
				return err
			}
		}
	}
	if stream == "" {
		stream = rand.Text() // nobody will continue it, but its blocks serve others
	}
	for _, c := range g.choices {
		c.tokenIDs = field.TokenIDs
		c.params.CatchUp, c.params.Priority = s.cfg.CatchUp, priority
		if s.cfg.KV != nil && !c.over() {
			c.params.KV = s.cfg.KV.Session(g.engine.Model(), KVStream{ID: stream, Attempt: attempt, Choice: c.index, Salt: field.Salt, Within: field.kvWithin(), Resume: field.Resume != nil})
		}
	}
	return nil
}

// streamSeed is the seed of a stream whose request has none.
func streamSeed(stream string) uint64 {
	sum := sha256.Sum256([]byte("kvmesh seed\x00" + stream))
	return binary.LittleEndian.Uint64(sum[:])
}

// resumed is the beginning of a choice that goes on elsewhere.
type resumed struct {
	text   []byte // of the delivered tokens, and not delivered with them
	reason string // the delivered tokens end the answer already
	byText bool   // the tokens are ours, for a text that came without them

	// What the relay is told with the next event; mode "" = nothing.
	mode               string
	restored, computed int
}

// resume puts a choice into the state it had after the delivered tokens. All of it is
// a function of the request and those tokens.
func (g *generation) resume(rc resumedChoice) error {
	const param = "kvmesh.resume"
	if rc.Index < 0 || rc.Index >= len(g.choices) {
		return openai.Invalid(param, "Invalid '%s': choice %d of %d.", param, rc.Index, len(g.choices))
	}
	c := g.choices[rc.Index]
	engine, ok := g.engine.(Resumer)
	if rc.Text != "" {
		if err := g.byText(c, &rc); err != nil {
			return err
		}
	}
	switch {
	case c.begun || c.params.Delivered > 0:
		return openai.Invalid(param, "Invalid '%s': choice %d is there twice.", param, rc.Index)
	case !ok:
		return openai.Invalid(param, "This engine cannot continue a stream.")
	case len(rc.TokenIDs) > c.params.MaxTokens:
		return openai.Invalid(param, "Invalid '%s': choice %d has %d tokens, and may have %d.", param, rc.Index, len(rc.TokenIDs), c.params.MaxTokens)
	}
	for _, id := range rc.TokenIDs {
		if id < 0 || int(id) >= g.engine.Model().Vocab {
			return openai.Invalid(param, "Invalid '%s': token id %d is not in the vocabulary of %d.", param, id, g.engine.Model().Vocab)
		}
	}
	c.begun = len(rc.TokenIDs) > 0 || rc.TextBytes > 0
	text := c.replay(engine, rc.TokenIDs)
	if err := g.follows(c, rc.TokenIDs); err != nil {
		return err
	}
	if rc.Text != "" && !strings.HasPrefix(rc.Text, string(text)) {
		return openai.Invalid(param, "Invalid '%s': the model spells the text of choice %d in another way.", param, rc.Index)
	}
	// Text that a later token has freed may be ahead of the tokens.
	early := rc.TextBytes - len(text)
	if rc.TextBytes < 0 || early > utf8.UTFMax*len(c.emit.buf) && (rc.Text == "" || c.resumed.reason == "") {
		return openai.Invalid(param, "Invalid '%s': choice %d delivered %d bytes of text, its tokens have %d.", param, rc.Index, rc.TextBytes, len(text))
	}
	if c.skip = max(early, 0); early <= 0 && c.begun {
		c.resumed.text = bytes.Clone(text[rc.TextBytes:])
	}
	c.generated, c.params.Delivered = len(rc.TokenIDs), len(rc.TokenIDs)
	c.params.MaxTokens -= len(rc.TokenIDs)
	c.ids = slices.Concat(c.ids, rc.TokenIDs)
	return nil
}

// byText gives a choice tokens for its delivered text, which came from a worker that
// told none: not those that were generated, in general, but of the same text.
func (g *generation) byText(c *choice, rc *resumedChoice) error {
	const param = "kvmesh.resume"
	if len(rc.TokenIDs) > 0 || rc.TextBytes != len(rc.Text) || len(c.echo) > 0 || c.tools != nil || c.params.TopLogprobs >= 0 {
		return openai.Invalid(param, "Invalid '%s': choice %d is more than its text and cannot go on by it.", param, rc.Index)
	}
	raw, err := json.Marshal(map[string]any{"prompt": rc.Text, "add_special_tokens": false})
	if err != nil {
		return err
	}
	req, bad := openai.ParseTokenize(raw)
	if bad != nil {
		return bad
	}
	ids, err := g.engine.Tokenize(req.Request, 0)
	// These may be more than those that were generated; then none are left to come.
	rc.TokenIDs, c.resumed.byText = ids[:min(len(ids), c.params.MaxTokens)], true
	return err
}

// replay feeds delivered tokens to the emitter and returns the text that may have
// been sent by then, echo included.
func (c *choice) replay(engine Resumer, ids []int32) []byte {
	defer func() { c.calls = nil }() // the client has those
	text := bytes.Clone(c.echo)
	c.offset = utf8.RuneCount(c.echo)
	if len(ids) > 0 && len(ids) == c.params.MaxTokens {
		c.resumed.reason = "length"
	}
	for _, id := range ids {
		if !c.params.IgnoreEOS && engine.EndsAnswer(id) {
			c.resumed.reason = "stop"
			return append(text, c.readTools(-1, c.emit.flush(), true)...)
		}
		b := engine.TokenBytes(id)
		c.offset += runeStarts(b)
		part, stopped := c.emit.push(b)
		text = append(text, c.readTools(id, part, stopped)...)
		if stopped {
			c.resumed.reason = "stop"
			return text
		}
	}
	if c.resumed.reason != "" {
		text = append(text, c.readTools(-1, c.emit.flush(), true)...)
	}
	return text
}

// over reports whether the delivered tokens end the answer.
func (c *choice) over() bool { return c.resumed.reason != "" }

// goOn sends what a continuation owes before its first new token, or to its end when
// there is none to come. It waits for that token, or for those of the request's other
// choices: before, the engine may refuse, and another worker can have the stream.
func (c *choice) goOn(out sink) error {
	r := &c.resumed
	if r.reason == "" && len(r.text) == 0 {
		return nil
	}
	if r.reason != "" {
		r.mode = modeReplayed // nothing had to be restored
		if r.byText {
			r.mode = modeText
		}
	}
	if len(r.text) > 0 || !c.begun {
		if err := out.text(c, r.text, nil); err != nil {
			return err
		}
		c.begun, r.text = true, nil
	}
	if r.reason == "" {
		return nil
	}
	return out.finish(c, c.tools.reason(r.reason))
}

// The ways in which a stream can go on, as the relay counts them.
const (
	modeExact    = "exact"     // KV restored, same batch shapes
	modeRestored = "restored"  // KV restored, batch shapes differ
	modeReplayed = "replayed"  // prefilled
	modeLossy    = "quantized" // KV restored that was quantized when it was stored
	modeText     = "text"      // by the delivered text, whose tokens nobody knew
)

// report notes how the engine came to a continuation's first token.
func (r *resumed) report(c *choice, tok Token) {
	if c.params.Delivered == 0 || !c.tokenIDs {
		return
	}
	r.restored, r.computed = tok.Restored, len(c.ids)-tok.Restored
	switch {
	case r.byText:
		r.mode = modeText
	case tok.Exact:
		r.mode = modeExact
	case tok.Lossy && tok.Restored > 0:
		r.mode = modeLossy
	case tok.Restored > 0 && tok.Restored >= len(c.ids)-c.params.Delivered:
		r.mode = modeRestored
	default:
		r.mode = modeReplayed
	}
}

// heldID is a token id on its way to the relay.
type heldID struct {
	id          int32
	start, size int // its raw bytes
}

// takeIDs moves the ids that can be sent to c.sent; last = all. Ids go out at once,
// with or without their text, which a continuation holds back again as the emitter
// does here. A token's log-probabilities could not be found again, so ids wait for
// them where they are wanted.
func (c *choice) takeIDs(last bool) {
	c.sent = c.sent[:0]
	n := 0
	for _, h := range c.held {
		if !last && c.params.TopLogprobs >= 0 && h.start >= c.emit.released && (h.size > 0 || h.start > c.emit.released) {
			break
		}
		c.sent = append(c.sent, h.id)
		n++
	}
	c.held = append(c.held[:0], c.held[n:]...)
}

// runeStarts counts the characters that begin in b.
func runeStarts(b []byte) int {
	n := 0
	for _, c := range b {
		if utf8.RuneStart(c) {
			n++
		}
	}
	return n
}
