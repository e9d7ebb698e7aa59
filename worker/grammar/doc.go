// Package grammar writes grammars in llama.cpp's notation (GBNF) for what an answer
// may be: any JSON object, JSON that follows a schema, calls of tools. It is pure.
//
// # JSON schemas
//
// Convert knows the part of JSON Schema that OpenAI's structured outputs allow, and
// refuses every other keyword by name and place: a keyword that is passed over
// would let through what the client believes impossible. Every text of the grammar
// parses and validates against the schema. The reverse is not promised:
//
//   - properties come in the order of the schema, those that are not required may
//     be left out, and no others come where properties are listed;
//   - white space is at most one space, or a line break with 20 blanks;
//   - numbers have at most 15 digits before the point and 15 after it;
//   - a string with a pattern is no more than what the pattern itself matches.
//
// The first three keep a model that is not sure from going on for ever.
//
// One schema has one grammar, on every worker: a stream goes on elsewhere only so.
//
// llama.cpp writes repetitions out: a string of at most 2000 characters is 2000 rules.
// They count in the limit of a grammar's size, and equal strings and lists are one rule.
// So do properties that may be left out, in a limit of their own. The schema that is too
// large is refused with the place where it became so.
package grammar
