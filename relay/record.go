package relay

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// record is a stream as another gateway can go on with it.
type record struct {
	head   recordHead
	frames []frame // in order, without gaps
}

// recordHead is what of a stream stays as it is: whose it is, and the request.
type recordHead struct {
	Owner  []byte      `json:"owner"`
	Stream string      `json:"stream"`
	Start  time.Time   `json:"start"`
	Path   string      `json:"path"`
	Query  string      `json:"query,omitempty"`
	Host   string      `json:"host,omitempty"`
	Header http.Header `json:"header"` // of the request, as the edge made it
	Body   []byte      `json:"body"`
	Status int         `json:"status"`
	Answer http.Header `json:"answer"` // the header that the client was told
}

// frame is one event with what the ledger gained by it.
type frame struct {
	N     int    `json:"n"` // events before it
	Event []byte `json:"event"`
	Last  bool   `json:"last,omitempty"` // it has no id and ends the answer
	Gain  *gain  `json:"gain,omitempty"`
}

// gain is the difference between two states of a job and its ledger.
type gain struct {
	Whole   bool         `json:"whole,omitempty"` // it is the state itself
	Origin  *origin      `json:"origin,omitempty"`
	Choices []choiceStep `json:"choices,omitempty"`
	Tokens  int64        `json:"tokens,omitempty"`
	Usage   bool         `json:"usage,omitempty"`
	Loose   string       `json:"loose,omitempty"`
	Attempt int          `json:"attempt,omitempty"`
	Moves   int          `json:"moves,omitempty"`
}

// choiceStep is what a choice gained.
type choiceStep struct {
	Index    int     `json:"index"`
	IDs      []int32 `json:"ids,omitempty"`
	Text     int     `json:"text,omitempty"` // bytes
	Said     []byte  `json:"said,omitempty"`
	Finished bool    `json:"finished,omitempty"`
}

// origin is whose answer it is: what its events have in common, and the worker that
// gives it. It changes with a move.
type origin struct {
	ID      []byte    `json:"id,omitempty"`
	Created []byte    `json:"created,omitempty"`
	Model   []byte    `json:"model,omitempty"`
	Print   []byte    `json:"print,omitempty"`
	First   time.Time `json:"first"` // token
	Worker  string    `json:"worker"`
	Engine  string    `json:"engine,omitempty"`
	Mark    string    `json:"mark,omitempty"`
	Weights string    `json:"weights,omitempty"`
	Tier    int       `json:"tier"`
	Pool    string    `json:"pool"`
	Only    string    `json:"only,omitempty"`
	Named   string    `json:"named,omitempty"` // place.model
	Most    int       `json:"most,omitempty"`
}

// stepper makes the gains of one job. It belongs to whoever holds the pen.
type stepper struct {
	owner   *attempt // whose origin was told
	choices []choiceMark
}

// choiceMark is how much of a choice was told.
type choiceMark struct {
	ids, text, said int
	seen, finished  bool
}

// next is what was not told yet; whole tells everything again. The pen is held.
func (t *stepper) next(j *job, whole bool) *gain {
	if whole {
		*t = stepper{}
	}
	l := &j.led
	out := &gain{Whole: whole, Tokens: l.tokens, Usage: l.usage, Loose: l.loose, Attempt: j.n, Moves: j.moves}
	if j.owner != nil && t.owner != j.owner {
		t.owner = j.owner
		out.Origin = originOf(j)
	}
	for i := range l.choices {
		if i >= len(t.choices) {
			t.choices = append(t.choices, choiceMark{})
		}
		c, was := &l.choices[i], &t.choices[i]
		now := choiceMark{len(c.ids), c.text, len(c.said), c.seen, c.finished}
		if now == *was {
			continue
		}
		s := choiceStep{Index: i, IDs: slices.Clone(c.ids[was.ids:]), Text: c.text - was.text, Finished: c.finished}
		if len(c.said) > was.said {
			s.Said = slices.Clone(c.said[was.said:])
		}
		out.Choices = append(out.Choices, s)
		*was = now
	}
	return out
}

func originOf(j *job) *origin {
	l, a := &j.led, j.owner
	return &origin{
		ID: l.id, Created: l.created, Model: l.model, Print: l.fingerprint, First: j.first,
		Worker: a.w.id, Engine: a.w.engine, Mark: a.w.mark, Weights: a.w.fingerprint,
		Tier: a.place.tier, Pool: a.place.pool, Only: a.place.only, Named: a.place.model, Most: a.place.most,
	}
}

// apply brings a job to the state after the gain.
func (g *gain) apply(j *job) error {
	l := &j.led
	if g.Whole {
		l.choices, j.owner = nil, nil
	}
	if o := g.Origin; o != nil {
		l.id, l.created, l.model, l.fingerprint = o.ID, o.Created, o.Model, o.Print
		j.first = o.First
		j.place = place{tier: o.Tier, pool: o.Pool, only: o.Only, model: o.Named, most: o.Most}
		// It is no more than a memory: it does not run, and its worker is left.
		j.owner = &attempt{j: j, ctx: j.ctx, w: worker{id: o.Worker, engine: o.Engine, mark: o.Mark, fingerprint: o.Weights}, place: j.place, mine: true}
	}
	l.tokens, l.usage, l.loose = g.Tokens, g.Usage, g.Loose
	j.n, j.moves = g.Attempt, g.Moves
	for _, c := range g.Choices {
		if c.Index < 0 || c.Index >= mostChoices || c.Text < 0 {
			return fmt.Errorf("%w: choice %d is none", errRecord, c.Index)
		}
		to := l.choice(c.Index)
		to.ids = append(to.ids, c.IDs...)
		to.text += c.Text
		if to.said = append(to.said, c.Said...); len(to.ids) > 0 {
			to.said = nil
		}
		to.seen, to.finished = true, c.Finished
	}
	return nil
}

// errRecord is the end of a record that is none.
var errRecord = errors.New("not a stream's record")

// check reports frames that do not follow each other, or that no ledger can be made of.
func (r *record) check() error {
	from := -1
	for i, f := range r.frames {
		switch {
		case f.N != r.frames[0].N+i, f.N < 0, f.Last && i != len(r.frames)-1:
			return fmt.Errorf("%w: event %d has the number %d", errRecord, i, f.N)
		case f.Gain != nil && f.Gain.Whole:
			from = i
		}
	}
	if from < 0 && (len(r.frames) == 0 || !r.over()) {
		return fmt.Errorf("%w: nothing says how it began", errRecord)
	}
	return nil
}

// restore brings a new job to where the record ends.
func (r *record) restore(j *job) error {
	from := 0
	for i, f := range r.frames {
		if f.Gain != nil && f.Gain.Whole {
			from = i
		}
	}
	for _, f := range r.frames[from:] {
		if f.Gain == nil {
			continue
		}
		if err := f.Gain.apply(j); err != nil {
			return err
		}
	}
	j.led.events = int64(r.numbered())
	return nil
}

// numbered is how many events with an id there were, and over whether the answer ended.
func (r *record) numbered() int {
	last := r.frames[len(r.frames)-1]
	if last.Last {
		return last.N
	}
	return last.N + 1
}

func (r *record) over() bool { return r.frames[len(r.frames)-1].Last }

// sealer encrypts what leaves the gateway's memory, by a key made of the relay's secret:
// whoever can read or write a shared store learns nothing of prompts and answers, and
// can put nothing into them.
type sealer struct{ aead cipher.AEAD }

func newSealer(secret string) (sealer, error) {
	key, err := hkdf.Key(sha256.New, []byte(secret), nil, "kvmesh streams of clients that may come back, v1", 32)
	if err != nil {
		return sealer{}, fmt.Errorf("derive the key of shared streams: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return sealer{}, fmt.Errorf("make the cipher of shared streams: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return sealer{}, fmt.Errorf("make the cipher of shared streams: %w", err)
	}
	return sealer{aead}, nil
}

// seal encrypts v as JSON; it opens at the same place only.
func (s sealer) seal(place string, v any) ([]byte, error) {
	plain, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode a part of a stream: %w", err)
	}
	return s.aead.Seal(nil, nil, plain, []byte(place)), nil
}

// open decrypts what seal made.
func (s sealer) open(place string, sealed []byte, v any) error {
	plain, err := s.aead.Open(nil, nil, sealed, []byte(place))
	if err != nil {
		return fmt.Errorf("%w: sealed with another secret, or spoiled", errRecord)
	}
	if err := json.Unmarshal(plain, v); err != nil {
		return fmt.Errorf("%w: %v", errRecord, err) // of JSON: it holds no values
	}
	return nil
}
