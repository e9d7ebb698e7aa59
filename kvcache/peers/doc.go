// Package peers is the memory of the other hosts as one store: a far tier of
// kvcache/stack, which writes each block to other hosts and finds what they have, and the
// copies of the open ends of streams. It knows peers by an interface; kvcache/kvrpc has the
// wire, and package placement says who has what.
//
// # Blocks
//
// A chain is cut into runs of 16 blocks, and all blocks of a run are on the same members,
// which the key of its first block chooses: so a look-up asks few, and chains that begin
// alike are spread. A copy goes to the first Copies-1 members that placement names; in the
// place of one that is away or full comes the next. A block that is on no other host is
// away (remote.ErrAway), also where there is no other one, and the stack waits with it.
//
// A look-up asks the members that placement names, and those that it named before somebody
// came or went, and fills up with others to 8, all at once; it takes the longest answer,
// and asks again for what follows, until nobody has more. It does not wait for those that
// are much slower than the first that has something. A read goes to the members that were
// heard to have the block, and to the next one when the first fails, or has not answered
// for a moment.
//
// A member that failed is passed over for a second, where others are, and told nothing.
//
// # Losing copies
//
// Each member is probed every 2 s, and names its memory. What is on one that has failed for
// 5 s, or has left, is on no other host; what was on one whose memory has another name is
// forgotten, however short it was away. Missing says which blocks are on too few hosts then,
// and the tails whose copies were there are copied anew.
//
// # Forgetting
//
// Drop and EraseTenant go to all members, and name those that could not, also those that have
// left. They owe it: it is noted in a file, and they are told as soon as they are there; until then
// nothing of it is read from them, or put there. Then
// everybody is told once more, this host too, for who comes back offers what it has to others
// before anybody can tell it.
//
// # Tails
//
// Grew says that a tail of the near store has grown. When it has grown by Interval tokens,
// or rests, a few goroutines read what is new from the near store and append it to a tail
// of the same stream, choice and attempt on the first member that placement names for the
// stream and that is there. What waits is only names, so it is bounded, and nobody waits
// for it. Behind a block that is on another host the copy is rotated, as the tail was; else
// it is begun anew beside the old one, which keeps what the block has until then.
package peers
