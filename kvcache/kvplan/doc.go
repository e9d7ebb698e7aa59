// Package kvplan says how much room and bandwidth the KV of a model needs, from the
// model's metadata: Hugging Face's config.json or the header of a GGUF file. It does no
// more than arithmetic.
//
// # Bytes of a token
//
//	2 × layers × KV heads × head dimension × bytes per value
//
// and for multi-head latent attention (MLA)
//
//	layers × (latent rank + rope dimension) × bytes per value
//
// Layers with a sliding window keep that many tokens and no more, so a long sequence has
// fewer bytes than its tokens would have one by one; each of its tokens was written all the
// same, and counts for disk and network. Layers with a recurrent state are not counted, and
// Shape.Notes says so. A codec takes 8 or 4 bits of a value and at most half a bit for the scales.
//
// # A host
//
// Streams of a context's length, of which a part is prompt and the rest is generated, run
// at once, without a pause between two of them. So one stream lasts
//
//	prompt ÷ prefill rate + output ÷ decode rate
//
// and the host computes streams × context tokens in that time, but never more than it can
// prefill and decode together. From this follow
//
//	memory       live streams × bytes of each × copies: a host keeps its own, and the
//	             copies of others' that others keep of its
//	disk         what is computed within the retention × copies, at least the memory
//	replication  what is computed × (copies - 1), which leaves the host
//	break-even   prefill rate × bytes of a token: whoever brings KV faster than that
//	             restores a prompt in less time than computing it would take
//
// Prefixes that streams share are stored once and counted as often as they are used, so
// these are bounds from above where prompts have much in common.
//
// # Metadata
//
// Metadata is not believed: numbers are bounded before they are multiplied, and lists
// before they are kept. What is missing is an error that names it, unless it has a usual
// value, such as as many KV heads as heads; then a note says so where it matters.
package kvplan
