package redistier

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// abreast is how many parts of a block are on their way at once.
const abreast = 4

// Put implements kvcache.Store.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	ctx, op, err := s.ops.Begin(ctx, remote.OpPut)
	if err != nil {
		return err
	}
	return op.End(s.put(ctx, f))
}

func (s *Store) put(ctx context.Context, f *kvcache.Frame) error {
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	there, err := s.known(ctx, f)
	if err != nil {
		return err
	}
	if there {
		s.ops.Count.Duplicates.Add(1)
		return nil
	}
	m := manifest{nonce: newNonce(), part: s.cfg.PartSize, header: f.Header}
	text := m.encode(f.Bytes()[:f.Len])
	if err := s.admit(ctx, &m, f.Total+int64(len(text))); err != nil {
		return err
	}
	published, err := s.write(ctx, &m, text, f.Bytes())
	if err != nil {
		s.abandon(&m)
		return err
	}
	// After the block: what is named can be read.
	if err := s.name(ctx, &f.Header); err != nil {
		return err
	}
	if !published {
		s.ops.Count.Duplicates.Add(1)
		return nil
	}
	s.ops.Count.Puts.Add(1)
	s.ops.Count.PutBytes.Add(uint64(f.Total))
	return nil
}

// known says whether a block is there, and sees that it is named and counted: its writer
// may have died before that.
func (s *Store) known(ctx context.Context, f *kvcache.Frame) (bool, error) {
	var manifest *redis.IntCmd
	var named *redis.FloatCmd
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		manifest = p.Exists(ctx, s.keys.manifest(f.Key))
		named = p.ZScore(ctx, s.keys.children(f.Parent), remote.EntryOf(&f.Header).Name())
	})
	if err != nil || manifest.Val() == 0 {
		return false, err
	}
	m := member(f.Fingerprint, f.Key)
	s.chores.use(m)
	if named.Err() == nil {
		return true, nil
	}
	if err := s.client.Eval(ctx, scriptAdmit, s.keys.lru(), m, f.Total).Err(); err != nil {
		return false, fmt.Errorf("count a block: %w", err)
	}
	return true, s.name(ctx, &f.Header)
}

// write puts the parts and then the manifest; false = another writer was faster.
func (s *Store) write(ctx context.Context, m *manifest, text, frame []byte) (bool, error) {
	all := s.keys.all(m)
	g, part := errgroup.WithContext(ctx)
	g.SetLimit(abreast)
	for i := range m.parts() {
		from := int64(i) * m.part
		// Sent from where they lie. Their life is short until there is a manifest.
		g.Go(func() error {
			return s.client.Set(part, all[1+i], frame[from:from+m.size(i)], 2*s.cfg.PutTimeout).Err()
		})
	}
	if err := g.Wait(); err != nil {
		return false, fmt.Errorf("write parts: %w", err)
	}
	n, err := s.client.Eval(ctx, scriptCommit, all, text, s.cfg.TTL.Milliseconds()).Int()
	switch {
	case err != nil:
		return false, fmt.Errorf("write the manifest: %w", err)
	case n < 0:
		return false, errors.New("write the manifest: parts are missing")
	}
	return n == 1, nil
}

// name adds a block to its parent's children.
func (s *Store) name(ctx context.Context, h *kvcache.Header) error {
	children := s.keys.children(h.Parent)
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		p.ZAdd(ctx, children, redis.Z{Member: remote.EntryOf(h).Name()})
		p.PExpire(ctx, children, s.cfg.TTL)
	})
	if err != nil {
		return fmt.Errorf("name a block: %w", err)
	}
	return nil
}

// Get implements kvcache.Store. The frame's bytes are this call's own.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpGet)
	if err != nil {
		return nil, err
	}
	l, err := s.get(ctx, ref)
	return l, op.End(err)
}

func (s *Store) get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	b, err := s.look(ctx, []kvcache.Key{ref.Key})
	if err != nil {
		return nil, err
	}
	if b[0].text == nil {
		return nil, s.miss(ref)
	}
	if b[0].err == nil {
		b[0].err = b[0].header.Check(ref)
	}
	if total := b[0].header.Total; b[0].err == nil && total > s.cfg.Limit {
		b[0].err = kvcache.Refuse(kvcache.ReasonTorn, "%d bytes, more than the store may hold", total)
	}
	if b[0].err != nil {
		return nil, s.refuse(ref, b[0], b[0].err)
	}
	data, err := s.read(ctx, &b[0].manifest)
	if errors.Is(err, redis.Nil) {
		// Removed meanwhile, or by a server that was short of memory.
		if n, err := s.client.Exists(ctx, s.keys.manifest(ref.Key)).Result(); err != nil || n == 0 {
			return nil, errors.Join(s.miss(ref), err)
		}
		err = kvcache.Refuse(kvcache.ReasonTorn, "a part is missing")
	}
	var f *kvcache.Frame
	if err == nil {
		f, err = s.cfg.Form.Decode(data, ref)
	}
	if err != nil {
		return nil, s.refuse(ref, b[0], err)
	}
	s.renew(ref.Fingerprint, b[0])
	s.ops.Count.Hits.Add(1)
	s.ops.Count.HitBytes.Add(uint64(f.Total))
	// What is released is gone for its reader, although nothing has to be given back.
	return kvcache.NewLent(f, func() {}, func(err error) {
		// A part is wrong: whoever comes next shall not try again.
		if s.ops.Refused(err) {
			s.purge(b[0])
		}
	}), nil
}

// miss counts one.
func (s *Store) miss(ref kvcache.Ref) error {
	s.ops.Count.Misses.Add(1)
	return fmt.Errorf("block %s: %w", ref.Key, kvcache.ErrNotFound)
}

// refuse counts the refusal of a block and removes it, unless it is right and only the
// asker is not. Other errors pass.
func (s *Store) refuse(ref kvcache.Ref, b block, err error) error {
	if s.ops.Refused(err) && !(b.err != nil && remote.Keeps(b.header, ref)) {
		b.key, b.model = ref.Key, ref.Fingerprint
		s.purge(b)
	}
	return fmt.Errorf("block %s: %w", ref.Key, err)
}

// purge removes a block that was refused, also for a caller that has no time left.
func (s *Store) purge(b block) {
	ctx, op, err := s.ops.Begin(context.Background(), remote.OpRemove)
	if err != nil {
		return // closed, or away: it is refused again
	}
	if err := op.End(s.remove(ctx, []block{b})); err != nil {
		s.cfg.Log.Warn("KV store in Redis: remove what was refused", "err", err)
	}
}

// read fetches the parts of a block, each into its place.
func (s *Store) read(ctx context.Context, m *manifest) ([]byte, error) {
	// Two bytes more: the end of the protocol's last line, which is read with its part.
	data := make([]byte, m.header.Total, m.header.Total+2)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(abreast)
	for i := range m.parts() {
		from, size := int64(i)*m.part, m.size(i)
		to := data[from : from+size]
		if i == m.parts()-1 {
			to = data[from : from+size+2]
		}
		g.Go(func() error {
			cmd := s.client.GetToBuffer(ctx, s.keys.part(m.header.Key, m.nonce, i), to)
			n, err := cmd.Result()
			if err == nil && int64(n) != size || err != nil && strings.Contains(err.Error(), "buffer too small") {
				err = kvcache.Refuse(kvcache.ReasonTorn, "part %d of %d bytes has another length", i, size)
			}
			return err
		})
	}
	return data, g.Wait()
}

// block is a manifest as it was found.
type block struct {
	manifest
	key   kvcache.Key
	model kvcache.Fingerprint
	text  []byte        // nil = there is none
	life  time.Duration // that it has left
	err   error         // why it is no manifest
}

// look reads manifests, those on each server in one go.
func (s *Store) look(ctx context.Context, list []kvcache.Key) ([]block, error) {
	texts, lives := make([]*redis.StringCmd, len(list)), make([]*redis.DurationCmd, len(list))
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		for i, key := range list {
			texts[i] = p.Get(ctx, s.keys.manifest(key))
			lives[i] = p.PTTL(ctx, s.keys.manifest(key))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	blocks := make([]block, len(list))
	for i, key := range list {
		b := &blocks[i]
		b.key, b.life = key, lives[i].Val()
		if text, err := texts[i].Bytes(); err == nil {
			b.text = text
			b.manifest, b.err = parseManifest(text, s.cfg.Form)
			b.model = b.header.Fingerprint
		}
	}
	return blocks, nil
}

// List implements remote.Source.
func (s *Store) List(ctx context.Context, _ kvcache.Space, asks []remote.Ask) ([][]remote.Entry, error) {
	cmds := make([]*redis.StringSliceCmd, len(asks))
	err := s.pipe(ctx, func(p redis.Pipeliner) {
		for i, a := range asks {
			cmds[i] = p.ZRangeByLex(ctx, s.keys.children(a.Parent), &redis.ZRangeBy{
				Min: "[" + a.Prefix, Max: after(a.Prefix), Count: remote.Page,
			})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list children: %w", err)
	}
	answers := make([][]remote.Entry, len(asks))
	for i, cmd := range cmds {
		for _, name := range cmd.Val() {
			if e, ok := remote.ParseName(name); ok {
				answers[i] = append(answers[i], e)
			}
		}
	}
	return answers, nil
}

// Headers implements remote.Source. A name without a block, whose life has ended or
// which a server has evicted, goes.
func (s *Store) Headers(ctx context.Context, space kvcache.Space, children []remote.Child) ([]*kvcache.Header, error) {
	list := make([]kvcache.Key, len(children))
	for i, c := range children {
		list[i] = c.Key
	}
	blocks, err := s.look(ctx, list)
	if err != nil {
		return nil, err
	}
	headers := make([]*kvcache.Header, len(children))
	for i, b := range blocks {
		c := children[i]
		ref := kvcache.Ref{Space: space, Parent: c.Parent, Key: c.Key}
		if b.text != nil && b.err == nil {
			b.err = b.header.Check(ref)
		}
		switch {
		case b.text == nil:
			s.chores.unname(c, space.Fingerprint)
		case b.err != nil:
			_ = s.refuse(ref, b, b.err) // counted there; the walk goes on without it
			s.chores.unname(c, space.Fingerprint)
		default:
			s.renew(space.Fingerprint, b)
			headers[i] = &blocks[i].header
		}
	}
	return headers, nil
}
