// Package prompts knows the tokens of prompts, without which nobody can tell which worker holds the
// KV of a prompt's beginning: KV events name tokens, and requests have text.
//
// Only a worker knows how its model turns text into tokens, and what its chat template adds. To ask
// one takes longer than a choice may, so nobody waits for the answer: a request whose prompt is
// not known goes where it would have gone, and its worker is asked beside it, at /tokenize. The next
// request that begins as this one did finds the tokens here. That is soon enough: a worker can
// only hold what was requested before.
//
// A Table keeps token ids by hashes of the text's beginnings, in steps of 128 bytes, with a key
// made at the start; it has no text. How many tokens the common beginning of two texts has is
// estimated by its share of the text, which is good enough to prefer a worker, and nothing else
// depends on it. Of each step the youngest text is found; an older one that shares it is found by
// what the two do not share, as long as it is there.
//
// What decides about tokens beside the text is part of it: the endpoint, the model's name as the
// client has it, the chat template and what steers it. So is the cache_salt, so that
// nobody learns from where a request goes what others have asked.
//
// A worker that is asked does the work of a tokenizer once for each text that is new. Two
// questions are on their way at once, and more than 32 that wait are dropped; it is as if the
// prompt had not been seen. A pool whose worker answers with an error, which is what a
// server without /tokenize does, is left alone for half a minute. Messages with pictures are not
// asked about: to tokenize them a server would fetch them.
//
// Token ids are a prompt all the same: they stay in memory, at most 4 million of
// them, until others need the room or nobody has asked for a quarter of an hour.
package prompts
