// Package remote is what the stores that are far from memory have in common: how a block
// is named among its parent's children, a look-up that asks for much at once and seldom,
// the counters and metrics, and the patience with a server that is slow or gone.
// kvcache/nvmetier, kvcache/redistier and kvcache/s3tier are built on it.
//
// # Names
//
// The children of a block lie in one folder, or one sorted set, by their names:
//
//	BEGIN-TOKENS-FIRST-KEY
//
// BEGIN is the first tokens of the block, at most 16, each in 8 hexadecimal digits, most
// significant first; TOKENS and FIRST are how many it has and the position of the first,
// in decimal; KEY is its key. So one listing says which child continues a run of tokens,
// because a key proves its tokens, and a listing that begins with some tokens leaves out
// everything else where a block has many children.
//
// # Look-up
//
// A look-up needs the children of each block of the chain. Where blocks are of one size,
// as they are in practice, the keys of a chain follow from the tokens alone, so the
// children of many blocks ahead are asked for in one batch; what was guessed wrong costs
// an empty answer. A second batch reads the headers of what was found: a look-up never
// names a block whose header it has not verified.
//
// # Patience
//
// Every call has a deadline: the caller's, and at most the store's own. A server that
// failed several calls in a row is left alone for a while, so that a dead one costs each
// caller nothing rather than its whole budget.
package remote
