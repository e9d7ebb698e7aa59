package sim

import (
	"strings"
	"unicode/utf8"
)

// The vocabulary, by ranges of ids. A chunk is one to four lower-case letters,
// with or without a space before them, written as a number in base 27.
const (
	idBOS   int32 = 256 + iota // start of every prompt
	idEnd                      // the model's end of the answer
	idTurn                     // end of a chat message
	idRole0                    // system; the other roles follow
)

const (
	idWords     int32 = 512  // + index in words: a common word with a space before it
	idChunks    int32 = 1024 // + chunk number, without a space
	chunkKinds  int32 = 27 * 27 * 27 * 27
	idSpaced          = idChunks + chunkKinds // + chunk number, with a space before it
	vocab             = idSpaced + chunkKinds
	chunkLetter       = 4 // most letters of a chunk
)

// roles are the chat roles in the order of their ids from idRole0.
const roles = "system developer user assistant tool function"

// wordList are the words of which answers are made. The order is part of what the
// model says, so a change here changes every answer.
const wordList = "the of and to in is that for it as was with on by at from are this have not " +
	"river light garden morning window paper letter stone bridge market summer winter evening harbour " +
	"mountain valley forest island village street kitchen table music silence story question answer " +
	"small large quiet bright early late warm cold green golden distant simple careful honest gentle " +
	"walks opens carries finds keeps turns waits follows remembers listens builds crosses begins ends " +
	"slowly quickly often never always together again almost nearly perhaps under over between beyond " +
	"child teacher sailor baker painter farmer doctor neighbour friend stranger traveller writer " +
	"bread water salt apple lamp door road train boat bird horse winter cloud rain snow wind fire"

// tokenizer is the fixed vocabulary. It does not change after newTokenizer.
type tokenizer struct {
	words []string // with the space before each
	ids   map[string]int32
}

// newTokenizer numbers the words in the order of wordList, each once.
func newTokenizer() *tokenizer {
	t := &tokenizer{ids: make(map[string]int32)}
	for w := range strings.FieldsSeq(wordList) {
		if _, dup := t.ids[" "+w]; dup {
			continue
		}
		t.ids[" "+w] = idWords + int32(len(t.words))
		t.words = append(t.words, " "+w)
	}
	return t
}

// encode appends the ids of text. Whatever has no shorter form becomes one id per
// byte, so decode always gives back the same bytes.
func (t *tokenizer) encode(dst []int32, text string) []int32 {
	for i := 0; i < len(text); {
		space := 0
		if text[i] == ' ' {
			space = 1
		}
		end := i + space
		for end < len(text) && text[end] >= 'a' && text[end] <= 'z' && end-i < 16 {
			end++
		}
		letters := end - i - space
		if id, ok := t.ids[text[i:end]]; ok {
			dst = append(dst, id)
			i = end
			continue
		}
		if letters+space < 2 || letters == 0 {
			dst = append(dst, int32(text[i]))
			i++
			continue
		}
		n := space + min(letters, chunkLetter)
		dst = append(dst, chunkID(text[i:i+n]))
		i += n
	}
	return dst
}

// chunkID numbers a chunk.
func chunkID(s string) int32 {
	base := idChunks
	if s[0] == ' ' {
		base, s = idSpaced, s[1:]
	}
	n := int32(0)
	for i := range len(s) {
		n = n*27 + int32(s[i]-'a') + 1
	}
	return base + n
}

// decode appends the bytes of one id; ids that stand for no text add nothing.
func (t *tokenizer) decode(dst []byte, id int32) []byte {
	switch {
	case id < 0 || id >= vocab:
		return dst
	case id < idBOS:
		return append(dst, byte(id))
	case id < idWords:
		return dst
	case id < idChunks:
		if i := int(id - idWords); i < len(t.words) {
			dst = append(dst, t.words[i]...)
		}
		return dst
	case id < idSpaced:
		return appendLetters(dst, id-idChunks)
	}
	return appendLetters(append(dst, ' '), id-idSpaced)
}

// appendLetters spells a chunk number; numbers that no chunk has add nothing.
func appendLetters(dst []byte, n int32) []byte {
	var letters [chunkLetter]byte
	i := len(letters)
	for ; n > 0 && i > 0; n /= 27 {
		if n%27 == 0 { // no chunk that encode makes
			return dst
		}
		i--
		letters[i] = byte('a' + n%27 - 1)
	}
	return append(dst, letters[i:]...)
}

// openCharacter returns the byte that continues the character that the ids end
// in, or false when they end in a whole one. Only the characters of specials count.
func openCharacter(ids []int32) (int32, bool) {
	var tail [utf8.UTFMax]byte
	i := len(tail)
	for k := len(ids) - 1; k >= 0 && i > 0 && ids[k] >= utf8.RuneSelf && ids[k] < idBOS; k-- {
		i--
		tail[i] = byte(ids[k])
		if !utf8.RuneStart(tail[i]) {
			continue
		}
		said := string(tail[i:])
		for _, s := range specials() {
			if len(said) < len(s) && strings.HasPrefix(s, said) {
				return int32(s[len(said)]), true
			}
		}
		break
	}
	return 0, false
}

// specials are characters of two, three and four bytes that answers contain; their
// first bytes differ, so the bytes said so far tell which one is being spelled.
func specials() [3]string { return [...]string{"é", "—", "🙂"} }
