// Package evict decides which block leaves a full store. It knows numbers and
// sizes, not bytes: it does no I/O, has no clock and no lock.
//
// # Order
//
// Only a block that no other block follows is a candidate, so the tail of a chain
// goes before its head and no block is left that nobody could reach. Among the
// candidates go, in this order:
//
//  1. those of owners that are dead (older versions of a model);
//  2. those of the owner that is furthest over its quota;
//  3. those that S3-FIFO chooses (Yang et al., SOSP 2023): new blocks wait in a
//     small queue and go from there unless they were used meanwhile, those that were
//     used go round in the main queue, and a block that comes back soon after it
//     went is taken into the main queue at once.
//
// Pinned blocks, and therefore all before them, are no candidates.
//
// A block that was followed and is so no longer is next to go in its queue, since
// what followed it has just been found useless; its own uses still count.
package evict

import "math"

// ID is the caller's number of a block. Numbers are small and may be used again
// after the block has left: they are places in a slice.
type ID uint32

// None is the parent of a block that follows none that is there.
const None = ID(math.MaxUint32)

// Owner is the caller's number of whom a block belongs to, small as well.
type Owner uint32

// Item is what the policy needs to know of a block.
type Item struct {
	// Name is equal when the same block comes back.
	Name uint64
	// Size is what the block takes, in whatever unit quotas have.
	Size int64
	// Parent is the block before it, or None.
	Parent ID
	Owner  Owner
}

// Config says how a Policy chooses.
type Config struct {
	// Quota is the size of an owner's blocks from which on they go first; 0 is none.
	Quota int64
	// SmallPercent is the share of the small queue; 0 is 10.
	SmallPercent int64
}

const (
	mostUses = 3 // that are counted
	// leastGhosts is how many names of evicted blocks are remembered at least, else
	// as many as there are blocks.
	leastGhosts = 1024
)

// node is one block. The zero value is a free place.
type node struct {
	Item
	links      [2]link // in a queue and in the owner's list
	kids, pins uint32
	uses       uint8 // since it came, or came round, at most mostUses
	live       bool
	main       bool // belongs to the main queue
	queued     bool // is a candidate: in a queue and in its owner's list
}

// owner is what is known of one owner.
type owner struct {
	list  list
	bytes int64
	dead  bool
}

// Policy orders the blocks of one store. It is not safe for concurrent use.
type Policy struct {
	cfg    Config
	nodes  []node
	owners []owner
	// queues are small and main. Their bytes are of all blocks that belong to them,
	// candidates or not.
	queues [2]list
	bytes  [2]int64
	count  int

	dead, over int // owners that are dead and have candidates or not, and over quota
	ghosts     ghosts
}

// The two queues.
const (
	small = iota
	main
)

// New makes an empty policy.
func New(cfg Config) *Policy {
	if cfg.SmallPercent == 0 {
		cfg.SmallPercent = 10
	}
	p := &Policy{cfg: cfg}
	p.queues = [2]list{newList(byQueue), newList(byQueue)}
	return p
}

// Len returns how many blocks there are.
func (p *Policy) Len() int { return p.count }

// Bytes returns the size of an owner's blocks.
func (p *Policy) Bytes(o Owner) int64 {
	if int(o) >= len(p.owners) {
		return 0
	}
	return p.owners[o].bytes
}

// Add takes a new block in as a candidate. Its number must be free.
func (p *Policy) Add(id ID, it Item) {
	for int(id) >= len(p.nodes) {
		p.nodes = append(p.nodes, node{})
	}
	p.owner(it.Owner)
	p.nodes[id] = node{Item: it, live: true, main: p.ghosts.take(it.Name)}
	p.count++
	p.grow(&p.nodes[id], it.Size)
	p.follow(it.Parent)
	p.queue(id, false)
}

// owner returns an owner's record, made if there is none.
func (p *Policy) owner(o Owner) *owner {
	for int(o) >= len(p.owners) {
		p.owners = append(p.owners, owner{list: newList(byOwner)})
	}
	return &p.owners[o]
}

// grow accounts for bytes of a block.
func (p *Policy) grow(n *node, bytes int64) {
	p.bytes[n.of()] += bytes
	o := &p.owners[n.Owner]
	was := p.isOver(o)
	o.bytes += bytes
	if is := p.isOver(o); is != was {
		p.over += change(is)
	}
}

// isOver says whether an owner is over its quota.
func (p *Policy) isOver(o *owner) bool { return p.cfg.Quota > 0 && o.bytes > p.cfg.Quota }

// change is 1 for what became true, else -1.
func change(is bool) int {
	if is {
		return 1
	}
	return -1
}

// of is the queue that a block belongs to.
func (n *node) of() int {
	if n.main {
		return main
	}
	return small
}

// queue makes a block a candidate if nothing speaks against it, as the next to go or
// as the last.
func (p *Policy) queue(id ID, next bool) {
	n := &p.nodes[id]
	if n.queued || n.kids > 0 || n.pins > 0 {
		return
	}
	n.queued = true
	p.queues[n.of()].add(p.nodes, id, next)
	p.owners[n.Owner].list.add(p.nodes, id, next)
}

// unqueue makes it none.
func (p *Policy) unqueue(id ID) {
	n := &p.nodes[id]
	if !n.queued {
		return
	}
	n.queued = false
	p.queues[n.of()].remove(p.nodes, id)
	p.owners[n.Owner].list.remove(p.nodes, id)
}

// follow notes that a block follows parent.
func (p *Policy) follow(parent ID) {
	if parent != None {
		p.unqueue(parent)
		p.nodes[parent].kids++
	}
}

// unfollow notes that one does no longer.
func (p *Policy) unfollow(parent ID) {
	if parent != None {
		p.nodes[parent].kids--
		p.queue(parent, true)
	}
}

// Adopt gives a block another parent, or None: one that came after it, or has left.
func (p *Policy) Adopt(id, parent ID) {
	n := &p.nodes[id]
	p.unfollow(n.Parent)
	n.Parent = parent
	p.follow(parent)
}

// Use notes a use of a block.
func (p *Policy) Use(id ID) {
	if n := &p.nodes[id]; n.uses < mostUses {
		n.uses++
	}
}

// Pin keeps a block, and those before it, until as many calls of Unpin.
func (p *Policy) Pin(id ID) {
	p.unqueue(id)
	p.nodes[id].pins++
}

// Unpin ends what one call of Pin began.
func (p *Policy) Unpin(id ID) {
	p.nodes[id].pins--
	p.queue(id, false)
}

// Pinned says whether a block itself is pinned.
func (p *Policy) Pinned(id ID) bool { return p.nodes[id].pins > 0 }

// SetDead says that an owner's blocks go before all others, or that they do not.
func (p *Policy) SetDead(o Owner, dead bool) {
	if w := p.owner(o); w.dead != dead {
		w.dead = dead
		p.dead += change(dead)
	}
}

// Remove forgets a block that has left for another reason than room. Blocks that
// follow it must have been adopted by then.
func (p *Policy) Remove(id ID) {
	p.unqueue(id)
	n := &p.nodes[id]
	p.grow(n, -n.Size)
	parent := n.Parent
	*n = node{}
	p.count--
	p.unfollow(parent)
}

// Evict forgets a block that Victim named, and remembers its name.
func (p *Policy) Evict(id ID) {
	if n := &p.nodes[id]; !n.main {
		p.ghosts.add(n.Name, max(leastGhosts, p.count))
	}
	p.Remove(id)
}

// Filter passes over candidates.
type Filter struct {
	// Busy says that a block cannot go at the moment; nil = each can.
	Busy func(ID) bool
	// Most is how many busy ones are passed over before the search is given up; 0 is
	// all. What was passed over goes to the end of its queue.
	Most int
}

// Victim names the next block to go, unless there is none. It stays until Evict.
func (p *Policy) Victim(f Filter) (ID, bool) {
	passed := 0
	busy := func(id ID) bool {
		if f.Busy == nil || !f.Busy(id) {
			return false
		}
		passed++
		return true
	}
	patient := func() bool { return f.Most == 0 || passed < f.Most }
	if p.dead > 0 {
		for i := range p.owners {
			if o := &p.owners[i]; o.dead {
				if id, ok := p.ofOwner(o, busy, patient); ok {
					return id, true
				}
			}
		}
	}
	if p.over > 0 {
		if id, ok := p.ofOwner(p.furthest(), busy, patient); ok {
			return id, true
		}
	}
	return p.ofAll(busy, patient)
}

// furthest is the owner furthest over its quota.
func (p *Policy) furthest() (most *owner) {
	for i := range p.owners {
		if o := &p.owners[i]; most == nil || o.bytes > most.bytes {
			most = o
		}
	}
	return most
}

// ofOwner names the next of one owner: the oldest that was not used since it came or
// came round. Each candidate goes round at most once per counted use.
func (p *Policy) ofOwner(o *owner, busy func(ID) bool, patient func() bool) (ID, bool) {
	for left := (mostUses + 1) * o.list.n; left > 0 && patient(); left-- {
		id := o.list.oldest
		n := &p.nodes[id]
		if !busy(id) && (n.uses == 0 || o.dead) {
			return id, true
		}
		n.uses -= min(n.uses, 1)
		o.list.remove(p.nodes, id)
		o.list.add(p.nodes, id, false)
	}
	return None, false
}

// ofAll names the next by S3-FIFO.
func (p *Policy) ofAll(busy func(ID) bool, patient func() bool) (ID, bool) {
	// Each candidate goes round at most once per counted use and once from small to
	// main; what is busy in every round is given up.
	stuck := [2]int{} // busy ones met in each queue
	for left := (mostUses + 2) * (p.queues[small].n + p.queues[main].n); left > 0 && patient(); left-- {
		turn := p.turn()
		if stuck[turn] >= p.queues[turn].n {
			turn = 1 - turn // everything there is busy
		}
		q := &p.queues[turn]
		if q.n == 0 {
			break
		}
		id := q.oldest
		n := &p.nodes[id]
		if n.uses == 0 && !busy(id) {
			return id, true
		}
		p.unqueue(id)
		switch {
		case n.uses == 0: // busy
			stuck[turn]++
		case n.main:
			n.uses--
		default:
			// One use is enough to stay, where the paper asks for two: a look-up of KV is
			// a request of its own, not the second half of one.
			n.uses = 0
			p.bytes[small] -= n.Size
			p.bytes[main] += n.Size
			n.main = true
		}
		p.queue(id, false)
	}
	return None, false
}

// turn is the queue from which the next one goes; one of them is not empty.
func (p *Policy) turn() int {
	if p.queues[small].n == 0 {
		return main
	}
	if p.queues[main].n > 0 && 100*p.bytes[small] < p.cfg.SmallPercent*(p.bytes[small]+p.bytes[main]) {
		return main
	}
	return small
}
