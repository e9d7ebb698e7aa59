package policy

import "strings"

// lines says at which line of its file each value of a document stands, by its path
// from the spec: "local[0].port". A mapping and a list stand where their name does.
type lines map[string]int

// of returns the line of a value, of what it belongs to when it is missing, or def.
func (l lines) of(path string, def int) int {
	for path != "" {
		if n, ok := l[path]; ok {
			return n
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return def
}

// wrong reports the value of a path in the document that begins at doc.
func (p *parser) wrong(doc Place, path, format string, args ...any) {
	p.fail(Place{doc.File, p.lines[doc].of(path, doc.Line)}, format, args...)
}

// given reports whether the document says something of a path, be it the zero value.
func (p *parser) given(doc Place, path string) bool {
	_, ok := p.lines[doc][path]
	return ok
}
