package worker

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker/grammar"
)

// useTools gives the choices of a request with tools what reads their calls, and the
// grammar that calls follow. It reports whether tools may be called.
func (g *generation) useTools(ctx context.Context, req *openai.Request) (bool, error) {
	if req.Endpoint != openai.Chat {
		return false, nil
	}
	tools, bad := req.DecodeTools()
	if bad != nil {
		return false, bad
	}
	choice, bad := req.DecodeToolChoice(tools)
	if bad != nil {
		return false, bad
	}
	if choice.Mode == openai.ToolsNone {
		return false, nil
	}
	m := g.engine.Model()
	if m.Tools == NoTools {
		return false, openai.Invalid("tools", "The model %q does not support 'tools': its chat template has no place for them in a form that is known here.", m.Name)
	}
	guarded, err := g.guardCalls(ctx, m.Tools, tools, choice)
	if err != nil {
		return false, err
	}
	for _, c := range g.choices {
		c.tools = newToolReader(m.Tools, tools, func() []byte { return callKey(c) })
		c.tools.mark, c.tools.guarded, c.tools.named = m.ToolMark, guarded, choice.Mode == openai.ToolsNamed
	}
	return true, nil
}

// guardCalls sets the grammar of calls: from the first token where the client wants
// a call, else from where the model begins one. It reports whether there is one.
func (g *generation) guardCalls(ctx context.Context, format ToolFormat, tools []openai.Tool, choice openai.ToolChoice) (bool, error) {
	late := choice.Mode == openai.ToolsAuto
	if _, ok := g.engine.(Constrainer); late && (!ok || format.Begin() == "") {
		return false, nil
	}
	text, err := callGrammar(format, tools, choice)
	if err != nil {
		return false, err
	}
	if err := g.follow(ctx, text, "tools"); err != nil {
		return false, err
	}
	for _, c := range g.choices {
		c.params.GrammarLate = late
	}
	return true, nil
}

// callKey is what the ids of a choice's calls are made of: the same for all workers
// that carry the stream, another for every turn of a conversation.
func callKey(c *choice) []byte {
	h := sha256.New()
	h.Write(binary.BigEndian.AppendUint64(nil, c.params.Seed))
	h.Write(binary.BigEndian.AppendUint32(nil, uint32(c.index)))
	for _, id := range c.ids[:len(c.ids)-c.params.Delivered] {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(id)))
	}
	return h.Sum(nil)
}

// callGrammar is the grammar of calls of the wanted functions.
func callGrammar(format ToolFormat, tools []openai.Tool, choice openai.ToolChoice) (string, error) {
	b := grammar.New()
	var options []string
	for i, t := range tools {
		if choice.Name != "" && t.Name != choice.Name {
			continue
		}
		args, bad := arguments(b, t, fmt.Sprintf("tools[%d].function.parameters", i))
		if bad != nil {
			return "", bad
		}
		key := "arguments"
		if format == Llama3 {
			key = "parameters"
		}
		options = append(options, grammar.Literal(`{"name": `)+" "+grammar.Quoted(t.Name)+" "+grammar.Literal(`, "`+key+`": `)+" "+args+` "}"`)
	}
	call := b.Rule(strings.Join(options, " | "))
	var first, next, end string
	switch format {
	case Hermes:
		first, next, end = "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
	case Mistral:
		first, next, end = "[TOOL_CALLS][", ", ", "]"
	case Llama3:
		next = "; "
	}
	if choice.Mode == openai.ToolsAuto {
		first = strings.TrimPrefix(first, format.Begin())
	}
	body := call
	if !choice.Single {
		body += " (" + grammar.Literal(next) + " " + call + ")*"
	}
	return b.Finish(grammar.Literal(first) + " " + body + " " + grammar.Literal(end)), nil
}

// arguments is the expression of a function's arguments, always an object. A schema
// that cannot be followed is an error of a strict function only: others get any
// object, as they would from a model without grammars.
func arguments(b *grammar.Builder, t openai.Tool, param string) (string, *openai.Error) {
	if t.Parameters == nil {
		return grammar.Literal("{}"), nil
	}
	if object := isObjectSchema(t.Parameters); t.Strict || object {
		expr, err := b.Schema(t.Parameters, param, t.Strict)
		if err == nil || t.Strict {
			return expr, err
		}
	}
	return b.Schema([]byte(`{"type":"object"}`), param, false)
}

// isObjectSchema reports whether a schema says that its values are objects.
func isObjectSchema(schema []byte) bool {
	var kind string
	d := jsontext.NewDecoder(strings.NewReader(string(schema)))
	if _, err := d.ReadToken(); err != nil {
		return false
	}
	for d.PeekKind() == '"' {
		name, err := d.ReadToken()
		if err != nil {
			return false
		}
		key := name.String()
		v, err := d.ReadValue()
		if err != nil {
			return false
		}
		if key == "type" {
			kind = string(v)
		}
	}
	return kind == `"object"`
}

// appendCalls puts the pieces of calls together.
func appendCalls(calls []openai.ToolCall, pieces []openai.ToolCallDelta) []openai.ToolCall {
	for _, p := range pieces {
		if p.ID != "" {
			calls = append(calls, openai.ToolCall{ID: p.ID, Type: p.Type, Function: p.Function})
			continue
		}
		calls[len(calls)-1].Function.Arguments += p.Function.Arguments
	}
	return calls
}
