// Package s3tier is a kvcache.Store in a bucket of any server that speaks S3: the tier
// with the most room and the longest memory, for what may take tens of milliseconds to
// begin. It keeps whole blocks; the open ends of streams stay on their hosts.
//
// # Objects
//
// A block is one object, its frame as package kvcache says and nothing else, under
//
//	PREFIX/FINGERPRINT/PARENT/NAME
//
// with Config.Prefix, the fingerprint and the parent's key in hexadecimal, and the name
// of package remote, which has the block's key. An object appears whole or not at all,
// so there is no manifest, and it is written on the condition that there is none, so the
// first writer wins. A listing of PREFIX/FINGERPRINT/PARENT/ is the index.
//
// A frame is read by ranges of Config.PartSize bytes, several at once, each into its
// place; a condition on the object's tag keeps them from being of two objects. Look-ups
// read ranges too, of the headers only, and remember them, because blocks never change.
//
// # Room and life
//
// S3 has no counters and does not say when something was read. Each process lists the
// bucket when it begins and every Config.SurveyEvery, and counts its own writes in
// between. Where the next block is more than Config.Limit allows, it lists again and
// removes blocks down to nine tenths: those that this process has not used and that were
// written longest ago, a block never before its children. So several processes together
// may be over the limit by what they write between two surveys. A block that is older
// than Config.TTL goes; one that is read in the last three quarters of its life is
// copied onto itself, which makes it new.
package s3tier
