package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Set is a checked set of documents with all defaults filled in.
type Set struct {
	Mesh   Mesh
	Pools  []WorkerPool
	Routes []ModelRoute
}

// File is one input of Parse.
type File struct {
	Name string // for messages
	Data []byte
}

// Parse reads all documents of the files, checks them together and fills in
// defaults. The error joins every problem found, each starting "file:line: ".
func Parse(files ...File) (*Set, error) {
	s := &Set{}
	p := &parser{set: s, seen: map[string]Place{}, lines: map[Place]lines{}}
	for _, f := range files {
		p.file = f.Name
		p.documents(f.Data)
	}
	if len(p.errs) == 0 {
		p.finish()
	}
	if err := errors.Join(p.errs...); err != nil {
		return nil, err
	}
	return s, nil
}

type parser struct {
	set  *Set
	file string
	doc  int              // line at which the document begins
	seen map[string]Place // kind/name → where
	errs []error

	lines map[Place]lines // of the values of each document
}

// line is a place in the file that is read.
func (p *parser) line(n int) Place { return Place{p.file, max(n, 1)} }

func (p *parser) fail(at Place, format string, args ...any) {
	// A message may quote what somebody wrote over several lines.
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
	p.errs = append(p.errs, fmt.Errorf("%v: %s", at, text))
}

func (p *parser) documents(data []byte) {
	p.doc = 1
	d := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var n yaml.Node
		err := d.Decode(&n)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			p.syntax(err)
			return
		}
		if n.Kind == yaml.DocumentNode && len(n.Content) == 1 && n.Content[0].Tag != "!!null" {
			p.document(n.Content[0])
		}
	}
}

// syntax reports yaml's own error, which begins with "yaml: line N: ".
func (p *parser) syntax(err error) {
	line, msg := p.doc, strings.TrimPrefix(err.Error(), "yaml: ")
	if n, serr := fmt.Sscanf(msg, "line %d:", &line); n == 1 && serr == nil {
		_, msg, _ = strings.Cut(msg, ": ")
	}
	p.fail(p.line(line), "%s", plain(msg))
}

// plain words yaml's message about a value of the wrong type, which names types of Go.
func plain(msg string) string {
	rest, ok := strings.CutPrefix(msg, "cannot unmarshal ")
	cut := strings.LastIndex(rest, " into ")
	if !ok || cut < 0 {
		return msg
	}
	got, target := rest[:cut], rest[cut+len(" into "):]
	tag, value, _ := strings.Cut(got, " ")
	if value = strings.Trim(value, "`"); value == "" {
		value = map[string]string{"!!map": "a mapping", "!!seq": "a list"}[tag]
	} else {
		value = strconv.Quote(value)
	}
	want := "a mapping (name: value)"
	switch target = strings.TrimLeft(target, "*"); {
	case strings.HasPrefix(target, "int"), strings.HasPrefix(target, "uint"):
		want = "a whole number"
	case strings.HasPrefix(target, "float"):
		want = "a number"
	case target == "bool":
		want = "true or false"
	case target == "string":
		want = "text"
	case strings.HasPrefix(target, "[]"):
		want = "a list"
	}
	return fmt.Sprintf("%s stands where %s belongs", value, want)
}

// document is the shape all kinds share.
type document struct {
	APIVersion string    `yaml:"apiVersion"`
	Kind       string    `yaml:"kind"`
	Metadata   metadata  `yaml:"metadata"`
	Spec       yaml.Node `yaml:"spec"`
}

type metadata struct {
	Name        string            `yaml:"name"`
	Namespace   string            `yaml:"namespace"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func (p *parser) document(n *yaml.Node) {
	var doc document
	p.doc = n.Line
	head := lines{} // of what all kinds share
	if !p.into(n, &doc, head) {
		return
	}
	at := p.line(n.Line)
	wrong := func(path, format string, args ...any) { p.fail(p.line(head.of(path, n.Line)), format, args...) }
	if doc.APIVersion != APIVersion {
		wrong("apiVersion", "apiVersion %q: want %s", doc.APIVersion, APIVersion)
		return
	}
	id := doc.Kind + "/" + doc.Metadata.Name
	if other, ok := p.seen[id]; ok {
		wrong("metadata.name", "%s is already defined at %v", id, other)
		return
	}
	p.seen[id] = at
	if doc.Metadata.Name == "" && doc.Kind != KindMesh {
		wrong("metadata.name", "metadata.name: missing")
		return
	}
	if !validName(doc.Metadata.Name) {
		wrong("metadata.name", "metadata.name %q: want lower-case letters, digits, '-' and '.', at most 63", doc.Metadata.Name)
		return
	}
	p.lines[at] = lines{}
	switch doc.Kind {
	case KindMesh:
		if other := p.set.Mesh.At; other.Line != 0 {
			p.fail(at, "a second %s: one is at %v already", KindMesh, other)
			return
		}
		p.set.Mesh.At = at
		if p.into(&doc.Spec, &p.set.Mesh, p.lines[at]) {
			p.durations(at, "", p.set.Mesh)
		}
	case KindWorkerPool:
		w := WorkerPool{Name: doc.Metadata.Name, At: at}
		if p.into(&doc.Spec, &w, p.lines[at]) {
			p.set.Pools = append(p.set.Pools, w)
			p.durations(at, "WorkerPool "+w.Name+": ", w)
			p.pool(w)
		}
	case KindModelRoute:
		r := ModelRoute{Name: doc.Metadata.Name, At: at}
		if p.into(&doc.Spec, &r, p.lines[at]) {
			p.set.Routes = append(p.set.Routes, r)
			p.durations(at, "ModelRoute "+r.Name+": ", r)
		}
	case "SessionPolicy", "CachePolicy", "TenantPolicy":
		wrong("kind", "kind %s is not supported by this version of kvmesh", doc.Kind)
	default:
		kinds := []string{KindMesh, KindWorkerPool, KindModelRoute}
		wrong("kind", "unknown kind %q%s; known kinds: %s", doc.Kind, suggest(doc.Kind, kinds), strings.Join(kinds, ", "))
	}
}

func validName(s string) bool {
	if len(s) > 63 {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.'
	})
}

// into decodes a node after checking every field name against the target's type, and
// notes where its values stand.
func (p *parser) into(n *yaml.Node, target any, ls lines) bool {
	if n.Kind == 0 {
		p.fail(p.line(p.doc), "spec: missing")
		return false
	}
	before := len(p.errs)
	p.unknown(n, reflect.TypeOf(target).Elem(), "", ls)
	if len(p.errs) > before {
		return false
	}
	err := n.Decode(target)
	if err == nil {
		return true
	}
	if te, ok := errors.AsType[*yaml.TypeError](err); ok {
		for _, msg := range te.Errors {
			p.syntax(errors.New(msg))
		}
	} else {
		p.syntax(err)
	}
	return false
}

// unknown reports the fields of n that t does not have, at any depth, and notes the
// lines of those it has.
func (p *parser) unknown(n *yaml.Node, t reflect.Type, path string, ls lines) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch {
	case t == reflect.TypeFor[yaml.Node]():
	case t.Kind() == reflect.Slice && n.Kind == yaml.SequenceNode:
		for i, c := range n.Content {
			item := fmt.Sprintf("%s[%d]", path, i)
			ls[item] = c.Line
			p.unknown(c, t.Elem(), item, ls)
		}
	case t.Kind() == reflect.Struct && n.Kind == yaml.MappingNode:
		fields := fieldsOf(t)
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, val := n.Content[i], n.Content[i+1]
			ft, ok := fields[key.Value]
			field := strings.TrimPrefix(path+"."+key.Value, ".")
			if !ok {
				names := make([]string, 0, len(fields))
				for name := range fields {
					names = append(names, name)
				}
				p.fail(p.line(key.Line), "unknown field %q%s", field, suggest(key.Value, names))
				continue
			}
			ls[field] = key.Line
			if val.Kind == yaml.ScalarNode {
				ls[field] = val.Line
			}
			p.unknown(val, ft, field, ls)
		}
	}
}

func fieldsOf(t reflect.Type) map[string]reflect.Type {
	out := make(map[string]reflect.Type, t.NumField())
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name != "" && name != "-" {
			out[name] = f.Type
		}
	}
	return out
}

// suggest returns ` (did you mean "x"?)` for the nearest name, or nothing when
// none is near.
func suggest(got string, names []string) string {
	slices.Sort(names)
	best, dist := "", 1+len(got)/2
	for _, name := range names {
		if d := distance(strings.ToLower(got), strings.ToLower(name)); d < dist {
			best, dist = name, d
		}
	}
	if best == "" {
		if len(names) == 0 {
			return ""
		}
		return " (known: " + strings.Join(names, ", ") + ")"
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}

// distance is the Levenshtein distance of two short names.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		prev := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cur := row[j+1]
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(row[j]+1, cur+1, prev+cost)
			prev = cur
		}
	}
	return row[len(b)]
}
