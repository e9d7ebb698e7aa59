package prompts

import (
	"encoding/json"
	"errors"
	"math"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// source is the text of a prompt as the client has written it. Two clients that write the same in
// another form have nothing in common here.
type source struct {
	head  []byte   // what else tokens depend on
	parts [][]byte // in the order in which a template has them
}

func (s source) bytes() (n int) {
	for _, p := range s.parts {
		n += len(p)
	}
	return n
}

// steering are the fields beside the text that tokens depend on.
func steering() []string {
	return []string{"add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"}
}

// texts are the fields with the text.
func texts(e openai.Endpoint) []string {
	if e == openai.Completions {
		return []string{"prompt"}
	}
	return []string{"tools", "messages"}
}

// read finds the text of a request's prompt, or its ids where the client gives them. Of several
// prompts it is nothing.
func read(req *openai.Request) (s source, ids []int32) {
	if raw := req.Raw("prompt"); req.Endpoint == openai.Completions && (len(raw) == 0 || raw[0] != '"') {
		return s, idsOf(raw[:min(len(raw), mostBytes)])
	}
	for _, name := range texts(req.Endpoint) {
		if raw := req.Raw(name); raw != nil {
			s.parts = append(s.parts, raw)
		}
	}
	s.head = append(append(s.head, req.Endpoint...), 0)
	s.head = append(append(s.head, req.Model...), 0)
	for _, name := range append(steering(), "cache_salt") {
		s.head = append(append(s.head, req.Raw(name)...), 0)
	}
	return s, nil
}

// idsOf reads a list of token ids, which may be cut off anywhere: the last one of such is left out. It is nil
// for anything else. A decoder of JSON takes many times as long.
func idsOf(raw []byte) (ids []int32) {
	if len(raw) == 0 || raw[0] != '[' {
		return nil
	}
	id, digits := int64(0), 0
	for _, c := range raw[1:] {
		switch {
		case c >= '0' && c <= '9' && id <= math.MaxInt32/10:
			id, digits = 10*id+int64(c-'0'), digits+1
		case c == ' ' || c == '\n' || c == '\r' || c == '\t':
		case (c == ',' || c == ']') && digits > 0 && id <= math.MaxInt32:
			ids, id, digits = append(ids, int32(id)), 0, 0
		default:
			return nil
		}
	}
	return ids
}

// question is the body by which a worker is asked for the tokens of a prompt.
func question(req *openai.Request, model string) []byte {
	b := append([]byte(`{"model":`), openai.AppendString(nil, []byte(model))...)
	for _, name := range append(texts(req.Endpoint), steering()...) {
		if raw := req.Raw(name); raw != nil {
			b = append(append(b, `,"`+name+`":`...), raw...)
		}
	}
	return append(b, '}')
}

// errMore is the error of messages that are more than text.
var errMore = errors.New("more than text")

// plain says whether all that a question has is text.
func plain(question []byte) error {
	req, err := openai.ParseTokenize(question)
	if err != nil {
		return errMore
	}
	if req.Endpoint == openai.Chat {
		if _, err := req.DecodeMessages(); err != nil {
			return errMore
		}
	}
	return nil
}

// saltOf is a request's cache_salt.
func saltOf(req *openai.Request) string {
	if raw := req.Raw("cache_salt"); len(raw) > 2 && raw[0] == '"' {
		var salt string
		if json.Unmarshal(raw, &salt) == nil {
			return salt
		}
	}
	return ""
}
