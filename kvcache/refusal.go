package kvcache

import "fmt"

// Reason says why stored bytes are not used.
type Reason uint8

// The reasons, in the order in which a frame is checked.
const (
	// ReasonTorn: shorter or longer than it says, or its lengths contradict.
	ReasonTorn Reason = iota
	// ReasonMagic: these bytes are something else.
	ReasonMagic
	// ReasonVersion: a version that this reader does not know.
	ReasonVersion
	// ReasonChecksum: the bytes are not those that were written.
	ReasonChecksum
	// ReasonForeign: of another fingerprint or another tenant.
	ReasonForeign
	// ReasonKey: another block than the one asked for, or one whose key is not
	// that of its tokens.
	ReasonKey
	// ReasonCodec: encoded in a way that this reader does not know.
	ReasonCodec
	// ReasonKind: what lies in its place is no regular file, and was not opened.
	ReasonKind

	reasons // how many there are
)

// String is the reason's name in metrics and messages.
func (r Reason) String() string {
	switch r {
	case ReasonTorn:
		return "torn"
	case ReasonMagic:
		return "magic"
	case ReasonVersion:
		return "version"
	case ReasonChecksum:
		return "checksum"
	case ReasonForeign:
		return "foreign"
	case ReasonKey:
		return "key"
	case ReasonCodec:
		return "codec"
	case ReasonKind:
		return "kind"
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// Reasons returns all reasons, for those who export counters by name.
func Reasons() []Reason {
	all := make([]Reason, reasons)
	for i := range all {
		all[i] = Reason(i)
	}
	return all
}

// Refusal is the error for bytes that are there and are not used.
type Refusal struct {
	Reason Reason
	// Detail is for people; it never has content of the block.
	Detail string
}

// Error implements error.
func (r *Refusal) Error() string { return "refused (" + r.Reason.String() + "): " + r.Detail }

// Refuse makes a refusal, as an error. What it says never has content of the block.
func Refuse(r Reason, format string, args ...any) error {
	return &Refusal{r, fmt.Sprintf(format, args...)}
}
