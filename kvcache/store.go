package kvcache

import (
	"context"
	"errors"
)

// Store keeps full blocks. Implementations are safe for concurrent use, and
// where they say so for use by several processes. A store is a cache: it may
// forget anything but what is lent, and it never returns what it cannot prove.
// A store that can append has Tails too; one that counts has Counted.
//
// The context bounds the time of a call: a store that is far away returns its
// error when it ends, or, from Longest, what it knows by then.
type Store interface {
	// Put publishes a sealed frame: after it returns nil every reader sees the
	// whole block, before that nobody sees any of it. The first writer of a key
	// wins and later ones succeed without writing. ErrFull says that there is no
	// room and none could be made. Put does not keep the frame. It may evict, so
	// it takes up to milliseconds: keep it off the path of a token.
	Put(ctx context.Context, f *Frame) error
	// Longest returns the longest chain of known blocks that q.IDs begin with. It
	// counts as a use of the chain, which is therefore not among the next to be
	// evicted. An unknown chain is an empty match, not an error.
	Longest(ctx context.Context, q Query) (Match, error)
	// Get lends one block, its header verified and its parts not yet: read
	// them by Part, Payload or Verify. ErrNotFound is a miss; a *Refusal says why a
	// block that is there cannot be used, and is to be treated as a miss.
	Get(ctx context.Context, ref Ref) (*Lent, error)
	// Drop forgets all blocks and tails of a fingerprint, of all tenants. What is
	// lent stays readable.
	Drop(ctx context.Context, f Fingerprint) error
	// Close ends the use of the store by this process; content that outlives
	// processes stays. What is lent stays readable. It may be called twice.
	Close() error
}

// Tails is the ability of a store to keep the open ends of streams.
type Tails interface {
	// OpenTail begins a tail for one attempt at a stream. ErrStale says that a
	// higher attempt was opened before; an equal one is let in and gets a tail
	// of its own. What other attempts wrote stays readable.
	OpenTail(ctx context.Context, spec TailSpec) (TailWriter, error)
	// ReadTail returns what is whole of the tails of one choice, the highest
	// attempt first and within it the newest first. Each ends before the first
	// range that is torn or wrong, whether its writer lives or not. The bytes are
	// the caller's. No tail is an empty list.
	ReadTail(ctx context.Context, s Space, stream string, choice int) ([]Tail, error)
	// DropTail forgets all tails of a stream. Writers that are still open get
	// ErrStale from then on.
	DropTail(ctx context.Context, s Space, stream string) error
}

// TailWriter appends to one tail. It is for one goroutine at a time.
type TailWriter interface {
	// Append adds a range behind the last one; ErrGap says that r.First is not
	// where that one ended. It copies r.Data and allocates nothing. After an error
	// the tail is what it was before, and the caller may go on with a range that
	// includes the one that failed. ErrStale says that a higher attempt has taken
	// over or the tail was dropped: it is final.
	Append(r Range) error
	// Rotate begins anew behind a block that has been put: the tail's tokens are
	// in it. It removes what this and lower attempts wrote before to this choice.
	Rotate(parent Key, first int) error
	// Close ends writing and keeps what was written. It may be called twice.
	Close() error
}

// Counted is the ability of a store to say what it did.
type Counted interface {
	// Stats returns the counters since this process opened the store.
	Stats() Stats
}

// Labeled is the ability of a store to remember what a fingerprint stands for.
type Labeled interface {
	// Label notes whose KV a fingerprint's is. The first label of a fingerprint stays
	// until the fingerprint is dropped. It is cheap enough for every block.
	Label(ctx context.Context, f Fingerprint, l Label) error
}

// Lister is the ability of a store to say at once of which models it may have blocks.
type Lister interface {
	// Labels returns those models, with their labels, which are empty where there are none.
	Labels(ctx context.Context) (map[Fingerprint]Label, error)
}

// Label says in words what a fingerprint stands for. It never has anything of a prompt.
type Label struct {
	// Model is the name under which the model is served.
	Model string `json:"model"`
	// Weights is the hash of the weights, KIND:HASH, by which versions of a model are told
	// apart; "" = not known, then it has no epochs.
	Weights string `json:"weights,omitempty"`
	// Text is what was hashed.
	Text string `json:"text,omitempty"`
}

// The errors that callers act on. All of them mean: go on without the store.
var (
	// ErrNotFound says that a store does not have a block.
	ErrNotFound = errors.New("block not found")
	// ErrStale says that a higher attempt has taken the stream over.
	ErrStale = errors.New("a higher attempt has taken this stream over")
	// ErrFull says that a store is at its limit and could not make room.
	ErrFull = errors.New("store is full")
	// ErrGap says that a range does not begin where the tail ends.
	ErrGap = errors.New("range does not begin where the tail ends")
	// ErrNoKey says that a tenant's key is not there.
	ErrNoKey = errors.New("the tenant has no key")
	// ErrAbsent says that a part was not read with the others of its block.
	ErrAbsent = errors.New("part was not asked for")
	// ErrClosed says that a store or a tail was used after Close.
	ErrClosed = errors.New("store is closed")
)

// Query asks for the blocks of a run of tokens.
type Query struct {
	Space
	// From is the key of the block that IDs follow; the zero Key is the root.
	From Key
	// First is the position of IDs[0]; 0 at the root.
	First int
	IDs   []int32
	// Veil is for stores of encrypted frames, which kvcache/remote is the look-up of;
	// nil = the tokens are kept as they are.
	Veil Veil
	// Resume says that the tokens are of a stream that goes on, so that blocks of an earlier
	// epoch of the model are good, too. Only a store with epochs looks at it.
	Resume bool
}

// Found is one block that a store has.
type Found struct {
	Ref
	// First is the position of the first token, and Tokens how many there are.
	First, Tokens int
	// Size is the length of the frame in bytes.
	Size int64
}

// Match is the answer to a Query.
type Match struct {
	// Blocks is the chain, in order: all tokens of each are in the query.
	Blocks []Found
	// Partial is the child of the chain's end that shares the most tokens with
	// the rest of the query, and Common is how many: more than 0 and fewer than
	// Partial.Tokens. Without such a child Common is 0. Its state is good for
	// that many tokens where the engine can cut it.
	Partial Found
	Common  int
}

// Tokens returns how many of the query's tokens the chain holds, without the
// partial block.
func (m Match) Tokens() int {
	n := 0
	for _, b := range m.Blocks {
		n += b.Tokens
	}
	return n
}

// TailSpec names a tail and says where it begins.
type TailSpec struct {
	Space
	// Stream is the stream's id; any text that is not empty.
	Stream string
	// Choice is the index of the choice, and Attempt the number of the attempt
	// at the stream; neither is negative.
	Choice, Attempt int
	// Parent is the key of the last full block before the tail, or the root, and
	// First is the position of the tail's first token.
	Parent Key
	First  int
}

// Range is the state of a few tokens that follow each other.
type Range struct {
	// First is the position of IDs[0].
	First int
	// IDs are 1 to 512 tokens.
	IDs   []int32
	Codec Codec
	// Data is what the engine wrote for these tokens; not empty.
	Data []byte
}

// Tail is what a reader gets of one tail. Its ranges follow each other from
// First on, without a gap.
type Tail struct {
	TailSpec
	Ranges []Range
}

// IDs returns the token ids of all ranges.
func (t Tail) IDs() []int32 {
	var ids []int32
	for _, r := range t.Ranges {
		ids = append(ids, r.IDs...)
	}
	return ids
}

// Lent is a block that a store lends: the frame's bytes are the store's, and
// reading them after Release is a fault of the program.
type Lent struct {
	*Frame
	release func()
}

// NewLent is for stores: it pairs a frame with what gives its bytes back, and
// with what is told of a part that turns out to be wrong; either may be nil.
func NewLent(f *Frame, release func(), refused func(error)) *Lent {
	f.refused = refused
	return &Lent{f, release}
}

// Reject tells the store that what it lends is wrong in a way that its checksums do not
// show: it is counted and removed as if they did.
func (l *Lent) Reject(err error) {
	if l.Frame.refused != nil {
		l.Frame.refused(err)
	}
}

// Release gives the bytes back. It may be called twice, not concurrently.
func (l *Lent) Release() {
	if l.release != nil {
		// Better an error from Part than a read of memory that is gone.
		l.Frame.data, l.Frame.pieces = nil, nil
		l.release()
		l.release = nil
	}
}

// Stats are the counters of a store in one process. All only grow, but for Used
// and Limit.
type Stats struct {
	Puts, PutBytes uint64
	// Duplicates are puts of blocks that were there.
	Duplicates uint64
	// Hits and Misses are of Get.
	Hits, Misses, HitBytes uint64
	// Lookups are calls of Longest; LookupTokens the tokens that they found.
	Lookups, LookupTokens uint64
	Appends, AppendBytes  uint64
	// Refused counts blocks and tails that were not served, by reason.
	Refused [reasons]uint64
	// Stale counts writes of attempts that had been overtaken.
	Stale uint64
	// Full counts writes that found no room; Failed those that failed otherwise.
	Full, Failed uint64
	// Late counts calls that were given up at their deadline, and those that were not
	// tried because others had just been.
	Late                    uint64
	Evictions, EvictedBytes uint64
	// Expired counts tails that were dropped by age, and Swept files of dead
	// processes.
	Expired, Swept uint64
	// Used and Limit are bytes; Used includes what other processes wrote.
	Used, Limit int64
}
