package evict

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// drain evicts everything and returns the order.
func drain(t *testing.T, p *Policy, busy func(ID) bool) (order []ID) {
	t.Helper()
	for {
		id, ok := p.Victim(Filter{Busy: busy})
		if !ok {
			return order
		}
		order = append(order, id)
		p.Evict(id)
	}
}

// add adds n blocks of size 1 that follow each other.
func add(p *Policy, first ID, n int, owner Owner) {
	parent := None
	for id := first; id < first+ID(n); id++ {
		p.Add(id, Item{Name: uint64(id), Size: 1, Parent: parent, Owner: owner})
		parent = id
	}
}

// wantOrder compares the order of all evictions.
func wantOrder(t *testing.T, p *Policy, want ...ID) {
	t.Helper()
	if got := drain(t, p, nil); !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

func TestOrder(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		make func(*Policy)
		want []ID
	}{
		"nothing":            {make: func(*Policy) {}},
		"oldest first":       {make: func(p *Policy) { add(p, 0, 1, 0); add(p, 1, 1, 0); add(p, 2, 1, 0) }, want: []ID{0, 1, 2}},
		"tail before head":   {make: func(p *Policy) { add(p, 0, 3, 0); add(p, 3, 2, 0) }, want: []ID{2, 1, 0, 4, 3}},
		"used goes last":     {make: func(p *Policy) { add(p, 0, 1, 0); add(p, 1, 1, 0); p.Use(0) }, want: []ID{1, 0}},
		"dead version first": {make: func(p *Policy) { add(p, 0, 2, 0); add(p, 2, 2, 1); p.Use(3); p.SetDead(1, true) }, want: []ID{3, 2, 1, 0}},
		"back to life": {
			make: func(p *Policy) { add(p, 0, 1, 0); add(p, 1, 1, 1); p.SetDead(1, true); p.SetDead(1, false) },
			want: []ID{0, 1},
		},
		"over quota first": {cfg: Config{Quota: 2}, make: func(p *Policy) {
			add(p, 0, 2, 0)
			add(p, 2, 4, 1)
		}, want: []ID{5, 4, 3, 2, 1, 0}},
		"pinned stays, and what is before it": {make: func(p *Policy) { add(p, 0, 4, 0); p.Pin(2) }, want: []ID{3}},
		"pinned twice":                        {make: func(p *Policy) { add(p, 0, 2, 0); p.Pin(1); p.Pin(1); p.Unpin(1) }},
		"unpinned":                            {make: func(p *Policy) { add(p, 0, 2, 0); add(p, 2, 1, 0); p.Pin(1); p.Unpin(1) }, want: []ID{2, 1, 0}},
		"a fork keeps the stem": {make: func(p *Policy) {
			add(p, 0, 2, 0)
			p.Add(2, Item{Parent: 0})
			p.Add(3, Item{Parent: 2})
		}, want: []ID{1, 3, 2, 0}},
		"a head that came late": {make: func(p *Policy) {
			add(p, 1, 2, 0)
			add(p, 0, 1, 0)
			p.Adopt(1, 0)
		}, want: []ID{2, 1, 0}},
		"a head that was lost": {make: func(p *Policy) {
			add(p, 0, 3, 0)
			p.Adopt(1, None)
			p.Remove(0)
		}, want: []ID{2, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			p := New(c.cfg)
			c.make(p)
			wantOrder(t, p, c.want...)
		})
	}
}

// TestGhost: what comes back soon after it went outlives what is merely new.
func TestGhost(t *testing.T) {
	p := New(Config{})
	add(p, 0, 1, 0)
	wantOrder(t, p, 0)
	add(p, 0, 1, 0)
	for id := ID(1); id < 10; id++ {
		add(p, id, 1, 0)
	}
	wantOrder(t, p, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0)
	// It is not remembered for ever.
	for id := range ID(3 * leastGhosts) {
		add(p, id, 1, 0)
		p.Evict(id)
	}
	if n := len(p.ghosts.known); n > leastGhosts {
		t.Errorf("%d names are remembered, at most %d", n, leastGhosts)
	}
	if n := len(p.ghosts.ring); n > 2*leastGhosts+2 {
		t.Errorf("%d names are kept", n)
	}
}

// TestBusy: what is in use is passed over, and if everything is, there is no victim.
func TestBusy(t *testing.T) {
	for _, dead := range []bool{false, true} {
		p := New(Config{})
		for id := range ID(4) {
			add(p, id, 1, 0)
		}
		p.SetDead(0, dead)
		busy := map[ID]bool{0: true, 2: true}
		if got := drain(t, p, func(id ID) bool { return busy[id] }); !slices.Equal(got, []ID{1, 3}) {
			t.Errorf("evicted %v, want 1 and 3", got)
		}
		if p.Len() != 2 {
			t.Errorf("%d left, want 2", p.Len())
		}
		asked := 0
		p.Victim(Filter{Most: 1, Busy: func(ID) bool { asked++; return true }})
		if want := 1 + len(p.owners) - 1; asked != want {
			t.Errorf("%d were passed over, want %d", asked, want)
		}
	}
}

// TestBusyNewcomer: a new block that is busy does not keep the used ones from going.
func TestBusyNewcomer(t *testing.T) {
	p := New(Config{})
	for id := ID(0); id < 40; id += 10 {
		add(p, id, 10, 0)
		p.Use(id + 9)
	}
	add(p, 40, 1, 0)
	id, ok := p.Victim(Filter{Busy: func(id ID) bool { return id == 40 }})
	if !ok || id != 9 {
		t.Errorf("victim %d, %v; want 9", id, ok)
	}
}

// TestScan: many blocks that nobody uses again do not push out those that are used.
func TestScan(t *testing.T) {
	hits := map[bool]int{}
	for _, scan := range []bool{false, true} {
		p, next := New(Config{}), ID(0)
		r := rand.New(rand.NewPCG(1, 1))
		zipf := rand.NewZipf(r, 1.2, 8, 1<<16)
		at, names, free := map[uint64]ID{}, map[ID]uint64{}, []ID{}
		for i := range 60_000 {
			name := zipf.Uint64()
			if scan && i%2 == 0 {
				name = 1<<32 + uint64(i) // never again
			}
			if id, ok := at[name]; ok {
				p.Use(id)
				hits[scan]++
				continue
			}
			if p.Len() == 500 {
				id, _ := p.Victim(Filter{})
				p.Evict(id)
				delete(at, names[id])
				free = append(free, id)
			}
			id := next
			if len(free) > 0 {
				id, free = free[0], free[1:]
			} else {
				next++
			}
			p.Add(id, Item{Name: name, Size: 1, Parent: None})
			at[name], names[id] = id, name
		}
	}
	// Half as many requests for what is known; nine of ten hits of these remain.
	if want := hits[false] / 2 * 9 / 10; hits[true] < want {
		t.Errorf("%d hits beside a scan, want at least %d", hits[true], want)
	}
}

// TestRules does random things and holds the policy to its rules: no victim is
// pinned, followed or unknown, dead ones and those over quota go first, sizes add up.
func TestRules(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		p := New(Config{Quota: 200})
		m := model{p: p, items: map[ID]Item{}, pins: map[ID]int{}, dead: map[Owner]bool{}}
		for range 3000 {
			m.step(t, r)
		}
		for id := range m.pins {
			for range m.pins[id] {
				p.Unpin(id)
			}
		}
		clear(m.pins)
		for len(m.items) > 0 {
			m.evict(t)
		}
		if p.Len() != 0 || p.bytes != [2]int64{} || p.queues[small].n+p.queues[main].n != 0 || p.over != 0 {
			t.Fatalf("seed %d: an empty policy is %+v", seed, p)
		}
	}
}

// model is the plainest policy that checks the other one.
type model struct {
	p     *Policy
	items map[ID]Item
	pins  map[ID]int
	dead  map[Owner]bool
}

// any picks a known block.
func (m *model) any(r *rand.Rand) (ID, bool) {
	if len(m.items) == 0 {
		return None, false
	}
	ids := make([]ID, 0, len(m.items))
	for id := range m.items {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids[r.IntN(len(ids))], true
}

func (m *model) step(t *testing.T, r *rand.Rand) {
	t.Helper()
	id, known := m.any(r)
	switch k := r.IntN(10); {
	case k < 4 || !known:
		m.add(r, id)
	case k < 6:
		m.p.Use(id)
	case k == 6 && len(m.pins) < 10:
		m.p.Pin(id)
		m.pins[id]++
	case k == 7 && m.pins[id] > 0:
		m.p.Unpin(id)
		if m.pins[id]--; m.pins[id] == 0 {
			delete(m.pins, id)
		}
	case k == 8 && r.IntN(20) == 0:
		o := Owner(r.IntN(4))
		m.dead[o] = !m.dead[o]
		m.p.SetDead(o, m.dead[o])
	default:
		if len(m.items) > 100 {
			m.evict(t)
		}
	}
}

// add adds a block behind another, or alone.
func (m *model) add(r *rand.Rand, parent ID) {
	id := ID(0)
	for _, used := m.items[id]; used; _, used = m.items[id] {
		id++
	}
	it := Item{Name: r.Uint64N(1000), Size: 1 + r.Int64N(10), Parent: None, Owner: Owner(r.IntN(4))}
	if parent != None && r.IntN(4) > 0 {
		it.Parent, it.Owner = parent, m.items[parent].Owner
	}
	m.items[id] = it
	m.p.Add(id, it)
}

// candidate says whether a block may go.
func (m *model) candidate(id ID) bool {
	for _, it := range m.items {
		if it.Parent == id {
			return false
		}
	}
	return m.pins[id] == 0
}

func (m *model) evict(t *testing.T) {
	t.Helper()
	bytes, first := map[Owner]int64{}, map[Owner]bool{}
	for id, it := range m.items {
		bytes[it.Owner] += it.Size
		first[it.Owner] = first[it.Owner] || m.candidate(id)
	}
	id, ok := m.p.Victim(Filter{})
	if !ok {
		for id := range m.items {
			if m.candidate(id) {
				t.Fatalf("no victim, but %d may go", id)
			}
		}
		t.Fatal("no candidate: the test has pinned too much")
	}
	it, known := m.items[id]
	if !known || !m.candidate(id) {
		t.Fatalf("%d is no candidate", id)
	}
	furthest := int64(0)
	for o, n := range bytes {
		if m.p.Bytes(o) != n {
			t.Fatalf("owner %d has %d bytes, want %d", o, m.p.Bytes(o), n)
		}
		furthest = max(furthest, n)
		if m.dead[o] && first[o] && !m.dead[it.Owner] {
			t.Fatalf("%d goes before what is dead", id)
		}
	}
	for o, n := range bytes {
		if n == furthest && n > 200 && first[o] && !m.dead[it.Owner] && bytes[it.Owner] < n {
			t.Fatalf("%d goes before an owner that is over its quota", id)
		}
	}
	delete(m.items, id)
	m.p.Evict(id)
}

// BenchmarkVictim evicts one of a million blocks, in chains of 16, half of which were
// used, and takes another in.
func BenchmarkVictim(b *testing.B) {
	p := New(Config{})
	r := rand.New(rand.NewPCG(1, 1))
	parent := None
	for id := range ID(1_000_000) {
		if id%16 == 0 {
			parent = None
		}
		p.Add(id, Item{Name: uint64(id), Size: 1, Parent: parent, Owner: Owner(id % 64)})
		if r.IntN(2) == 0 {
			p.Use(id)
		}
		parent = id
	}
	name := uint64(1_000_000)
	b.ReportAllocs()
	for b.Loop() {
		id, ok := p.Victim(Filter{})
		if !ok {
			b.Fatal("no victim")
		}
		p.Evict(id)
		name++
		p.Add(id, Item{Name: name, Size: 1, Parent: None})
	}
}
