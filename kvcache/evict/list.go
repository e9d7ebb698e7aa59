package evict

// link is a node's place in a list.
type link struct{ older, newer ID }

// The two links of a node.
const (
	byQueue = iota
	byOwner
)

// list is a queue of nodes that are linked through themselves.
type list struct {
	which          int // of a node's links
	oldest, newest ID
	n              int
}

func newList(which int) list { return list{which: which, oldest: None, newest: None} }

// add puts a node at the old end, which is the next to go, or at the new one.
func (l *list) add(nodes []node, id ID, old bool) {
	l.n++
	at := link{older: l.newest, newer: None}
	if old {
		at = link{older: None, newer: l.oldest}
	}
	nodes[id].links[l.which] = at
	l.join(nodes, at.older, id)
	l.join(nodes, id, at.newer)
}

// remove takes a node out.
func (l *list) remove(nodes []node, id ID) {
	l.n--
	at := nodes[id].links[l.which]
	l.join(nodes, at.older, at.newer)
}

// join makes two nodes neighbours; None is the end of the list.
func (l *list) join(nodes []node, older, newer ID) {
	if older == None {
		l.oldest = newer
	} else {
		nodes[older].links[l.which].newer = newer
	}
	if newer == None {
		l.newest = older
	} else {
		nodes[newer].links[l.which].older = older
	}
}

// ghosts are the names of blocks that were evicted unused, the oldest first.
type ghosts struct {
	known map[uint64]bool
	ring  []uint64
	head  int // the oldest that is left in ring
}

// add remembers a name, and forgets the oldest beyond most.
func (g *ghosts) add(name uint64, most int) {
	if g.known == nil {
		g.known = map[uint64]bool{}
	}
	if g.known[name] {
		return
	}
	g.known[name] = true
	g.ring = append(g.ring, name)
	for len(g.ring)-g.head > most {
		// A name that came back is in the ring and not known; there may be a younger
		// one of it, which then goes early.
		delete(g.known, g.ring[g.head])
		g.head++
	}
	if g.head > len(g.ring)/2 {
		g.ring = append(g.ring[:0], g.ring[g.head:]...)
		g.head = 0
	}
}

// take says whether a name is remembered, and forgets it.
func (g *ghosts) take(name uint64) bool {
	known := g.known[name]
	delete(g.known, name)
	return known
}
