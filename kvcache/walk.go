package kvcache

import "context"

// Seen is one block as a walk finds it.
type Seen struct {
	// Name is how the store calls it, for people.
	Name string
	// Header is what the block says of itself; nil where Err says why it cannot be used.
	Header *Header
	Err    error
}

// Walker is the ability of a store to show all that it has, which is no use of it. A walk
// takes as long as it takes: minutes for a bucket with a million blocks, whose headers lie
// apart. Each call of a server in it has the time of a call, so that one that hangs ends the
// walk and does not hold it up; all of it ends with its context.
type Walker interface {
	// Walk calls each with every block that is there from the beginning to the end, one
	// after the other and in no order, and ends with the first error that each returns.
	// What comes or goes meanwhile may be among them.
	Walk(ctx context.Context, each func(Seen) error) error
	// Check reads a block whole and verifies it. The error is ErrNotFound where it has gone,
	// and a *Refusal where it is wrong: then it is removed and counted as for any reader.
	Check(ctx context.Context, ref Ref) error
}

// CheckBy is a Check by a store's own Get.
func CheckBy(ctx context.Context, get func(context.Context, Ref) (*Lent, error), ref Ref) error {
	l, err := get(ctx, ref)
	if err != nil {
		return err
	}
	defer l.Release()
	return l.Verify()
}
