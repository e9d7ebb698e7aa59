// Package stack puts stores on top of each other: a near one, in the memory of the host,
// and far ones below it, in the order in which they are asked: a disk, Redis, S3. It is
// itself a kvcache.Store. The open ends of streams are the near store's alone.
//
// # Writing
//
// A block is put when the near store has it. From then on it waits, by its name only, in
// one bounded queue for each far tier, and a few goroutines of that tier's own take it from
// the near store and put it there. So a far tier delays nobody, and what waits takes no
// memory; where a queue is full, or the near store has given a block up before its turn
// came, the block is dropped for that tier and counted. A tier that is away is waited for.
//
// # Reading
//
// Longest asks the near store first, then the far tiers, in their order, for what follows:
// each when the one before does not have everything, or has not answered for a moment.
// What they have is brought into the near store, in the order of the prefix, several blocks
// at once and each by one caller at a time; then the near store is asked again, so that
// the answer is what is contiguous there. Get brings one block.
//
// # Patience
//
// A caller waits until its own deadline and not longer, also for a tier that does not
// look at contexts, such as a disk that hangs: the call is left alone, ends when it ends,
// and what it finds is there for the next one. As long as a call that somebody left still
// runs, its tier is not asked. Nor is it where what was measured says that it would take
// longer than to compute the tokens, for which the caller's time is taken to be the time;
// that is tried anew every ten seconds.
//
// A block that is wrong in a far tier is refused before it comes near.
//
// # Leaving
//
// Drop is for what must not be found again: it goes everywhere, other hosts' memory and what
// is on its way included. Reclaim is for a version of a model that has been replaced: the
// near store is left to its owner, who knows which streams still need it, and tiers that are
// apart to theirs.
package stack
