package relay

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// span is a range of bytes of an event's data; to 0 is none.
type span struct{ from, to int }

func (s span) of(data []byte) []byte { return data[s.from:s.to] }

// chunkView is what one event of a stream says, as places in its data. It is valid
// until the next scan.
type chunkView struct {
	id, created, model, fingerprint span // values
	usage, failed                   span // values other than null
	choices                         []choiceView
	choicesAt                       span // the array
	dropped                         bool // the server gave a choice up
}

// isFailure reports whether the event ends the attempt, and not the answer: an error event,
// or the end of the server's will to give it.
func (v *chunkView) isFailure() bool { return v.failed.to > 0 || v.dropped }

// choiceView is what an event says of one choice.
type choiceView struct {
	at    span // the object
	index int
	ids   []int32
	told  bool // ids were there, be it none

	text    int  // bytes that it adds, decoded
	said    span // the JSON string they come from
	role    span // member with its comma
	calls   bool // of tools
	probs   bool
	strange bool // it adds what no text_bytes count
	finish  bool
	reason  span // the value of finish_reason, where finish

	kv                 string // how a continuation went on, "" when not told
	restored, computed int
}

// bare says that the event adds nothing to the choice, its role aside.
func (c *choiceView) bare() bool {
	return c.text == 0 && len(c.ids) == 0 && !c.calls && !c.probs && !c.strange && !c.finish
}

// edit replaces a range of an event's data.
type edit struct {
	span
	with []byte
}

// scanner reads the events of one attempt. It decodes no more of them than the ledger
// counts, once, and copies nothing. Not safe for concurrent use.
type scanner struct {
	keepIDs bool // the client wants token_ids

	dec   *jsontext.Decoder
	src   bytes.Buffer
	data  []byte // of the event
	base  int    // where in data the decoder began
	view  chunkView
	edits []edit // that remove what only the relay asked for, in order
	ids   []int32

	// What stands before and behind the choices, the brackets included, is mostly the same
	// in all events: then only the choices are read.
	head, tail []byte
	frame      chunkView // of the event from which they are
}

// errNoChunk says that an event's data is no object with choices of a known shape.
var errNoChunk = errors.New("not an OpenAI chunk")

// scan reads one event's data.
func (s *scanner) scan(data []byte) (*chunkView, error) {
	s.data, s.edits, s.ids = data, s.edits[:0], s.ids[:0]
	if len(s.head) > 0 && len(data) > len(s.head)+len(s.tail) && bytes.HasPrefix(data, s.head) && bytes.HasSuffix(data, s.tail) {
		s.view = chunkView{id: s.frame.id, created: s.frame.created, model: s.frame.model, fingerprint: s.frame.fingerprint, choices: s.view.choices[:0]}
		s.begin(len(s.head)-1, len(data)-len(s.tail)+1)
		if s.readChoices() == nil && s.atEnd() {
			return &s.view, nil
		}
		s.edits, s.ids = s.edits[:0], s.ids[:0]
	}
	s.view = chunkView{choices: s.view.choices[:0]}
	s.begin(0, len(data))
	if _, err := s.object(s.member); err != nil {
		return nil, err
	}
	if !s.atEnd() {
		return nil, errNoChunk
	}
	s.remember(data)
	return &s.view, nil
}

// begin sets the decoder to a part of the data.
func (s *scanner) begin(from, to int) {
	s.base = from
	s.src = *bytes.NewBuffer(s.data[from:to]) // the decoder reads such a buffer in place
	if s.dec == nil {
		s.dec = jsontext.NewDecoder(&s.src, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	} else {
		s.dec.Reset(&s.src, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	}
}

// at is where the decoder is in the data.
func (s *scanner) at() int { return s.base + int(s.dec.InputOffset()) }

// atEnd reports whether the decoder's part was one value.
func (s *scanner) atEnd() bool {
	_, err := s.dec.ReadToken()
	return errors.Is(err, io.EOF)
}

// remember keeps the frame of an event whose choices come last but for a usage of null,
// and of which nothing outside of them is to be changed.
func (s *scanner) remember(data []byte) {
	v := &s.view
	s.head = s.head[:0]
	at := v.choicesAt
	if at.to == 0 || v.usage.to > 0 || v.failed.to > 0 || slices.ContainsFunc(s.edits, func(e edit) bool { return e.from < at.from || e.to > at.to }) {
		return
	}
	switch tail := data[at.to-1:]; string(tail) {
	case "]}", `],"usage":null}`:
		s.head, s.tail, s.frame = append(s.head, data[:at.from+1]...), append(s.tail[:0], tail...), *v
	}
}

// object reads an object, each member by f, which must read the value, and returns its
// place. What f says is to go is removed, with the comma that sets it apart.
func (s *scanner) object(f func(name []byte) (drop bool, err error)) (at span, err error) {
	if tok, err := s.dec.ReadToken(); err != nil || tok.Kind() != '{' {
		return at, errNoChunk
	}
	kept, open, last := false, -1, s.at()
	at.from = last - 1
	for s.dec.PeekKind() != '}' {
		name, err := s.dec.ReadValue()
		if err != nil {
			return at, err
		}
		from := s.at() - len(name)
		if open >= 0 { // the members before went, up to this one
			s.edits = append(s.edits, edit{span: span{open, from}})
			open = -1
		}
		drop, err := f(name)
		if err != nil {
			return at, err
		}
		switch to := s.at(); {
		case drop && kept:
			s.edits = append(s.edits, edit{span: span{last, to}})
		case drop:
			open = from
		default:
			kept = true
		}
		last = s.at()
	}
	if open >= 0 {
		s.edits = append(s.edits, edit{span: span{open, last}})
	}
	_, err = s.dec.ReadToken()
	at.to = s.at()
	return at, err
}

// value reads any value and returns its place.
func (s *scanner) value() (jsontext.Value, span, error) {
	v, err := s.dec.ReadValue()
	to := s.at()
	return v, span{to - len(v), to}, err
}

// member reads one member of the event itself.
func (s *scanner) member(name []byte) (drop bool, err error) {
	if string(name) == `"choices"` && s.dec.PeekKind() == '[' {
		return false, s.readChoices()
	}
	v, at, err := s.value()
	if err != nil || v[0] == 'n' {
		return string(name) == `"prompt_token_ids"` && !s.keepIDs, err
	}
	switch string(name) {
	case `"id"`:
		s.view.id = at
	case `"created"`:
		s.view.created = at
	case `"model"`:
		s.view.model = at
	case `"system_fingerprint"`:
		s.view.fingerprint = at
	case `"usage"`:
		s.view.usage = at
	case `"error"`:
		s.view.failed = at
	case `"prompt_token_ids"`:
		return !s.keepIDs, nil
	}
	return false, nil
}

// readChoices reads the array of choices.
func (s *scanner) readChoices() error {
	if _, err := s.dec.ReadToken(); err != nil {
		return err
	}
	from := s.at() - 1
	for s.dec.PeekKind() != ']' {
		s.view.choices = append(s.view.choices, choiceView{})
		c := &s.view.choices[len(s.view.choices)-1]
		var err error
		if c.at, err = s.object(func(name []byte) (bool, error) { return s.choiceMember(c, name) }); err != nil {
			return err
		}
	}
	if _, err := s.dec.ReadToken(); err != nil {
		return err
	}
	s.view.choicesAt = span{from, s.at()}
	return nil
}

// choiceMember reads one member of a choice.
func (s *scanner) choiceMember(c *choiceView, name []byte) (drop bool, err error) {
	switch kind := s.dec.PeekKind(); {
	case string(name) == `"delta"` && kind == '{':
		_, err := s.object(func(name []byte) (bool, error) { return false, s.deltaMember(c, name) })
		return false, err
	case string(name) == `"kvmesh"` && kind == '{':
		_, err := s.object(func(name []byte) (bool, error) { return false, s.kvMember(c, name) })
		return true, err
	}
	v, at, err := s.value()
	if err != nil {
		return false, err
	}
	null := v[0] == 'n'
	switch string(name) {
	case `"index"`:
		if c.index, err = strconv.Atoi(string(v)); err != nil || c.index < 0 || c.index >= mostChoices {
			return false, errNoChunk
		}
	case `"text"`:
		c.text, c.said = decodedLen(v), at
	case `"token_ids"`:
		if !null {
			c.told = true
			err = s.readIDs(c, v)
		}
		return !s.keepIDs, err
	case `"prompt_token_ids"`:
		return !s.keepIDs, nil
	case `"finish_reason"`:
		c.finish = !null && string(v) != `""`
		c.reason = at
		s.view.dropped = s.view.dropped || c.finish && openai.Dropped(string(bytes.Trim(v, `"`)))
	case `"logprobs"`:
		c.probs = !null
	}
	return false, nil
}

// mostChoices bounds the index of a choice.
const mostChoices = 1024

// deltaMember reads what a chat event adds to a choice.
func (s *scanner) deltaMember(c *choiceView, name []byte) error {
	from := s.at() - len(name)
	v, at, err := s.value()
	if err != nil || v[0] == 'n' {
		return err
	}
	switch string(name) {
	case `"role"`:
		c.role = span{from, at.to}
	case `"content"`:
		c.text, c.said = decodedLen(v), at
	case `"tool_calls"`:
		c.calls = len(v) > 2
	default:
		c.strange = c.strange || string(v) != `""`
	}
	return nil
}

// kvMember reads how a continuation went on.
func (s *scanner) kvMember(c *choiceView, name []byte) error {
	v, _, err := s.value()
	if err != nil {
		return err
	}
	n, _ := strconv.Atoi(string(v)) // 0 for what is no number
	switch string(name) {
	case `"kv"`:
		c.kv = kvName(string(bytes.Trim(v, `"`)))
	case `"restored"`:
		c.restored = n
	case `"computed"`:
		c.computed = n
	}
	return nil
}

// readIDs reads a list of token ids into the scanner's own memory.
func (s *scanner) readIDs(c *choiceView, v []byte) error {
	at := len(s.ids)
	if v[0] != '[' {
		return errNoChunk
	}
	for f := range bytes.FieldsFuncSeq(v[1:len(v)-1], func(r rune) bool { return r == ',' || r <= ' ' }) {
		n, err := strconv.ParseInt(string(f), 10, 32)
		if err != nil {
			return errNoChunk
		}
		s.ids = append(s.ids, int32(n))
	}
	c.ids = s.ids[at:len(s.ids):len(s.ids)]
	return nil
}

// decodedLen is how many bytes a JSON string has once decoded; 0 for another value.
func decodedLen(v []byte) int {
	if len(v) < 2 || v[0] != '"' {
		return 0
	}
	v = v[1 : len(v)-1]
	n := len(v)
	for {
		i := bytes.IndexByte(v, '\\')
		if i < 0 || i+1 >= len(v) {
			return n
		}
		if v[i+1] != 'u' {
			n--
			v = v[i+2:]
			continue
		}
		size, used := escapedRune(v[i:])
		n += size - used
		v = v[i+used:]
	}
}

// escapedRune returns how many bytes of UTF-8 the escape \uXXXX at the beginning of v
// stands for, and how many it takes, with a second one where they are a pair.
func escapedRune(v []byte) (size, used int) {
	r, ok := hex4(v)
	if !ok {
		return 0, min(2, len(v))
	}
	if r < 0xd800 || r > 0xdfff {
		return utf8.RuneLen(r), 6
	}
	if r < 0xdc00 && len(v) >= 12 {
		if low, ok := hex4(v[6:]); ok && low >= 0xdc00 && low <= 0xdfff {
			return 4, 12
		}
	}
	return utf8.RuneLen(utf8.RuneError), 6
}

// hex4 reads \uXXXX.
func hex4(v []byte) (rune, bool) {
	if len(v) < 6 || v[0] != '\\' || v[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(v[2:6]), 16, 16)
	return rune(n), err == nil
}
