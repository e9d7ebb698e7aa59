package worker

import (
	"context"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker/grammar"
)

// formatGrammar is the grammar that a request's response_format asks for, "" for
// plain text.
func formatGrammar(req *openai.Request) (string, error) {
	f, bad := req.DecodeResponseFormat()
	if bad != nil {
		return "", bad
	}
	switch {
	case f.Type == openai.FormatText:
		return "", nil
	case f.Schema == nil:
		return grammar.Object(), nil
	}
	text, bad := grammar.FromSchema(f.Schema, openai.SchemaParam, f.Strict)
	if bad != nil {
		return "", bad
	}
	return text, nil
}

// constrain makes every choice follow the request's response_format and tools. The
// grammar begins with the answer, so it also holds for what was delivered elsewhere.
func (g *generation) constrain(ctx context.Context, req *openai.Request) error {
	text, err := formatGrammar(req)
	if err != nil {
		return err
	}
	tools, err := g.useTools(ctx, req)
	switch {
	case err != nil || text == "":
		return err
	case tools:
		return openai.Invalid("response_format", "'response_format' other than text is not supported beside 'tools', unless 'tool_choice' is \"none\".")
	}
	return g.follow(ctx, text, "response_format")
}

// follows checks that the delivered tokens of a choice keep to its grammar: the engine
// could not go on from others.
func (g *generation) follows(c *choice, ids []int32) error {
	e, ok := g.engine.(Constrainer)
	if !ok || c.params.Grammar == "" || c.over() {
		return nil
	}
	if ok, err := e.Follow(c.params, ids); err != nil || ok {
		return err
	}
	return openai.Invalid("kvmesh.resume", "Invalid 'kvmesh.resume': the tokens of choice %d break the grammar of the request.", c.index)
}

// follow gives every choice a grammar that the field param asked for.
func (g *generation) follow(ctx context.Context, text, param string) error {
	c, ok := g.engine.(Constrainer)
	if !ok {
		return openai.Invalid(param, "'%s' is not supported by this engine: it follows no grammars.", param)
	}
	if err := c.Constrain(ctx, text); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if param == "response_format" {
			param = openai.SchemaParam
		}
		return openai.Invalid(param, "Invalid '%s': the engine cannot follow it: %v.", param, err)
	}
	for _, c := range g.choices {
		c.params.Grammar, c.params.IgnoreEOS = text, false
	}
	return nil
}
