// Package placement decides which KV nodes keep copies of what: rendezvous hashing over
// the members that live, by the room that they have, and another zone first. It is pure:
// who is a member, and when, is its callers' to know, and equal members give an equal
// answer on every host.
//
// Each member has a number for each key, from a hash of both and the member's weight; the
// smallest is best. So a member that joins takes from the others what it is best for, and
// nothing else moves; one that leaves, or gets less weight, gives up its own share only.
//
// A copy is not kept by its source, which is a member too. So the members that have it
// depend on where it was made, and whoever reads does not know that: Readers are those that
// any source would have chosen, a handful.
package placement

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Member is a KV node. Members are comparable.
type Member struct {
	// ID names the node; it outlives its restarts.
	ID string
	// Zone is where it is; "" is a zone, too.
	Zone string
	// Addr is the host and port of its server for peers.
	Addr string
	// Room is how many bytes it keeps; 0 counts as 1 GiB.
	Room int64
	// Busy is how fast its memory turns over, from 0 to 1: a copy that is put where all
	// goes at once is no copy.
	Busy float64
}

// leastWeight is what is left of the weight of a member that is as busy as can be: were it
// nothing, all of its copies would move at once.
const leastWeight = 0.1

// weight is a member's share, beside those of the others.
func (m Member) weight() float64 {
	room := float64(m.Room) / (1 << 30)
	if m.Room <= 0 {
		room = 1
	}
	return room * (1 - (1-leastWeight)*min(max(m.Busy, 0), 1))
}

// number is exponentially distributed over keys, with the weight as its rate: so each
// member is the least of all as often as its share of the weights says.
func (m Member) number(key kvcache.Key) float64 {
	b := append(make([]byte, 0, 64), key[:]...)
	h := xxh3.Hash(append(b, m.ID...))
	u := (float64(h>>11) + 0.5) / (1 << 53) // between 0 and 1, and neither
	return -math.Log(u) / m.weight()
}

// Rank returns the members, the best for a key first.
func Rank(members []Member, key kvcache.Key) []Member {
	type ranked struct {
		Member
		n float64
	}
	list := make([]ranked, len(members))
	for i, m := range members {
		list[i] = ranked{m, m.number(key)}
	}
	slices.SortFunc(list, func(a, b ranked) int { return cmp.Or(cmp.Compare(a.n, b.n), cmp.Compare(a.ID, b.ID)) })
	out := make([]Member, len(list))
	for i, r := range list {
		out[i] = r.Member
	}
	return out
}

// Replicas returns the members that keep copies of what a source has, in the order in which
// they are to be taken: as many as copies are wanted from the beginning, and the others in
// place of those that fail. The source is not among them; as long as there are zones that
// have none, members in those come first.
func Replicas(members []Member, source Member, key kvcache.Key) []Member {
	return fromRank(Rank(members, key), source)
}

// fromRank picks from members in their rank, zone by zone.
func fromRank(ranked []Member, source Member) []Member {
	rest := slices.DeleteFunc(slices.Clone(ranked), func(m Member) bool { return m.ID == source.ID })
	zones := map[string]bool{source.Zone: true}
	out := make([]Member, 0, len(rest))
	for len(rest) > 0 {
		i := slices.IndexFunc(rest, func(m Member) bool { return !zones[m.Zone] })
		if i < 0 {
			return append(out, rest...)
		}
		zones[rest[i].Zone] = true
		out = append(out, rest[i])
		rest = slices.Delete(rest, i, i+1)
	}
	return out
}

// Readers returns the members of which one keeps a copy if any does, where each source makes
// so many: those that some source would have chosen, the best first.
func Readers(members []Member, key kvcache.Key, copies int) []Member {
	ranked := Rank(members, key)
	chosen := map[string]bool{}
	for _, source := range ranked {
		replicas := fromRank(ranked, source)
		for _, m := range replicas[:min(copies, len(replicas))] {
			chosen[m.ID] = true
		}
	}
	return slices.DeleteFunc(ranked, func(m Member) bool { return !chosen[m.ID] })
}

// StreamKey is the key by which the tails of a stream are placed.
func StreamKey(s kvcache.Space, stream string) kvcache.Key {
	h := xxh3.New()
	_, _ = h.Write(s.Root[:]) // never fails
	_, _ = h.WriteString(stream)
	var key kvcache.Key
	sum := h.Sum128()
	binary.LittleEndian.PutUint64(key[:], sum.Lo)
	binary.LittleEndian.PutUint64(key[8:], sum.Hi)
	return key
}

// nameForm is what ids and zones consist of: they are in addresses, keys and labels.
const nameForm = `^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`

// Validate says what is wrong with a member.
func (m Member) Validate() error {
	form := regexp.MustCompile(nameForm)
	host, port, err := net.SplitHostPort(m.Addr)
	switch {
	case !form.MatchString(m.ID):
		return fmt.Errorf("id %.80q of a KV node: want letters, digits, '.', '_' and '-', 128 at most", m.ID)
	case m.Zone != "" && !form.MatchString(m.Zone):
		return fmt.Errorf("zone %.80q of KV node %s: want letters, digits, '.', '_' and '-', 128 at most", m.Zone, m.ID)
	case err != nil:
		return fmt.Errorf("address %.80q of KV node %s: %w", m.Addr, m.ID, err)
	case host == "" || port == "" || port == "0":
		return fmt.Errorf("address %.80q of KV node %s: no host or no port", m.Addr, m.ID)
	case m.Room < 0 || math.IsNaN(m.Busy) || m.Busy < 0 || m.Busy > 1:
		return fmt.Errorf("KV node %s: room %d or load %v is none", m.ID, m.Room, m.Busy)
	}
	return nil
}

// Parse reads ID=ADDR or ID=ZONE@ADDR, where ADDR is host:port.
func Parse(text string) (Member, error) {
	id, rest, ok := strings.Cut(text, "=")
	if !ok {
		return Member{}, fmt.Errorf("KV node %.80q: want ID=ZONE@HOST:PORT or ID=HOST:PORT", text)
	}
	m := Member{ID: id, Addr: rest}
	if zone, addr, ok := strings.Cut(rest, "@"); ok {
		m.Zone, m.Addr = zone, addr
		if zone == "" {
			return Member{}, errors.New("KV node " + id + ": the zone before the @ is missing")
		}
	}
	return m, m.Validate()
}
