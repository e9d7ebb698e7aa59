package sealed

import (
	"context"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Longest implements kvcache.Store. What is under an older key is looked for where the
// newer ones end. A partial block is read, because only its content says which it is.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (m kvcache.Match, err error) {
	if q.From == (kvcache.Key{}) {
		q.From = q.Root
	}
	keys := s.of(q.Space)
	var partial *partial
	for since, i := 0, 0; since < len(keys) && len(q.IDs) > 0; i, since = (i+1)%len(keys), since+1 {
		found, part, failed := s.under1(ctx, keys[i], q)
		if failed != nil {
			if err = failed; len(m.Blocks) > 0 {
				err = nil // what was found still holds
			}
			return m, err
		}
		if n := len(found.Blocks); n > 0 {
			m.Blocks = append(m.Blocks, found.Blocks...)
			q.From, q.First, q.IDs = found.Blocks[n-1].Key, q.First+found.Tokens(), q.IDs[found.Tokens():]
			since, partial = 0, nil
		}
		if part != nil && (partial == nil || part.common > partial.common) {
			partial = part
		}
	}
	if partial != nil {
		m.Partial, m.Common = s.resolve(ctx, q, partial)
	}
	return m, nil
}

// partial is a block that shares some tokens, by the names of one key.
type partial struct {
	key    *secret
	found  kvcache.Found
	common int
}

// under1 looks up what is under one key.
func (s *Store) under1(ctx context.Context, k *secret, q kvcache.Query) (kvcache.Match, *partial, error) {
	v := &veil{key: k, q: q, plain: map[kvcache.Key]kvcache.Key{}, runs: map[kvcache.Key]*tokenRun{}}
	from := k.name(q.From)
	v.plain[from] = q.From
	m, err := s.under.Longest(ctx, kvcache.Query{Space: k.space(q.Space), From: from, First: q.First, IDs: q.IDs, Veil: v})
	if err != nil {
		return kvcache.Match{}, nil, err
	}
	var out kvcache.Match
	for _, b := range m.Blocks {
		plain, known := v.plain[b.Key]
		size, ok := plainSize(b.Size, b.Tokens)
		if !known || !ok {
			return out, nil, nil // no frame of ours
		}
		b.Ref = kvcache.Ref{Space: q.Space, Parent: v.plain[b.Parent], Key: plain}
		b.Size = size
		out.Blocks = append(out.Blocks, b)
	}
	if m.Common > 0 {
		return out, &partial{k, m.Partial, m.Common}, nil
	}
	return out, nil, nil
}

// resolve reads a partial block behind the end of a chain; 0 tokens = it is none.
func (s *Store) resolve(ctx context.Context, q kvcache.Query, p *partial) (kvcache.Found, int) {
	f, err := s.get(ctx, p.key, p.found.Ref, nil)
	if err != nil || f.Space != q.Space || f.Parent != q.From || f.First != q.First {
		return kvcache.Found{}, 0
	}
	n := 0
	for n < min(len(f.IDs), len(q.IDs)) && f.IDs[n] == q.IDs[n] {
		n++
	}
	if n == 0 || n == len(f.IDs) {
		return kvcache.Found{}, 0
	}
	return kvcache.Found{Ref: f.Ref, First: f.First, Tokens: len(f.IDs), Size: f.Total}, n
}

// veil is a kvcache.Veil of one query, for one goroutine.
type veil struct {
	key *secret
	q   kvcache.Query
	// plain are the plain keys of those that were named.
	plain map[kvcache.Key]kvcache.Key
	runs  map[kvcache.Key]*tokenRun
}

// tokenRun is what stands for the tokens behind one parent, as far as it was asked for.
type tokenRun struct {
	run *run
	at  int
	ids []int32
}

// IDs implements kvcache.Veil.
func (v *veil) IDs(parent kvcache.Key, at, n int) []int32 {
	r := v.runs[parent]
	if r == nil || r.at != at {
		r = &tokenRun{run: v.key.run(v.plain[parent]), at: at}
		v.runs[parent] = r
	}
	for len(r.ids) < n {
		r.ids = append(r.ids, r.run.next(v.q.IDs[at+len(r.ids)]))
	}
	return r.ids[:n:n]
}

// Key implements kvcache.Veil.
func (v *veil) Key(parent kvcache.Key, at, n int) kvcache.Key {
	plain := v.q.Key(v.plain[parent], v.q.IDs[at:at+n])
	key := v.key.name(plain)
	v.plain[key] = plain
	return key
}
