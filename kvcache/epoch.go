package kvcache

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

const (
	// mostPast and mostVersions bound what an epoch's record remembers, the newest of each.
	mostPast     = 32
	mostVersions = 64
	// mostEpochText bounds the name of a model and of its weights in a record, in bytes.
	mostEpochText = 512
)

// Epoch is the record of which weights are a model's now. A model gets a new epoch when
// weights come that it never had: from then on what was computed with other weights is old.
// The zero Epoch is that of a model of which nobody has heard. It is a value: what changes
// it returns another one.
type Epoch struct {
	// Model is the name under which it is served.
	Model string `json:"model"`
	// Number counts the epochs, from 1 on.
	Number uint64 `json:"epoch"`
	// Weights are those of this epoch, and Past those of earlier ones, the oldest first.
	Weights string   `json:"weights"`
	Past    []string `json:"past,omitempty"`
	// Fingerprints are of blocks that were computed with Weights.
	Fingerprints []Fingerprint `json:"fingerprints,omitempty"`
	// Old are those of blocks of earlier epochs.
	Old []OldVersion `json:"old,omitempty"`
}

// OldVersion is a fingerprint of an earlier epoch.
type OldVersion struct {
	Fingerprint Fingerprint `json:"fingerprint"`
	Weights     string      `json:"weights"`
	// Reclaimed says that the room of its blocks has been given back.
	Reclaimed bool `json:"reclaimed"`
}

// EpochKey names a record. Weights that are named in two ways cannot be compared, so each
// way has a record of its own.
type EpochKey struct {
	Model string
	// Kind is the way in which the weights are named, such as sha256.
	Kind string
}

// EpochKeyOf returns the key of the record for a model's weights, KIND:HASH.
func EpochKeyOf(model, weights string) (EpochKey, error) {
	kind, hash, ok := strings.Cut(weights, ":")
	switch {
	case !ok || kind == "" || hash == "":
		return EpochKey{}, fmt.Errorf("weights %.80q: want KIND:HASH", weights)
	case model == "":
		return EpochKey{}, errors.New("a model without a name")
	case len(model) > mostEpochText || len(weights) > mostEpochText:
		return EpochKey{}, fmt.Errorf("the name of a model or its weights has more than %d bytes", mostEpochText)
	}
	return EpochKey{model, kind}, nil
}

// Key returns the key of the record.
func (e Epoch) Key() EpochKey {
	kind, _, _ := strings.Cut(e.Weights, ":")
	return EpochKey{e.Model, kind}
}

// Announced returns the record after somebody has said what weights a fingerprint's are; the
// zero fingerprint stands for none. Weights that the model never had begin an epoch, those
// that it had before do not. Changed is false where the record knows all that.
func (e Epoch) Announced(weights string, f Fingerprint) (next Epoch, changed bool) {
	switch {
	case weights == e.Weights:
		if f == (Fingerprint{}) || slices.Contains(e.Fingerprints, f) {
			return e, false
		}
		e.Fingerprints = newest(append(slices.Clone(e.Fingerprints), f))
	case e.Number > 0 && slices.Contains(e.Past, weights):
		at := slices.IndexFunc(e.Old, func(o OldVersion) bool { return o.Fingerprint == f })
		if f == (Fingerprint{}) || at >= 0 && !e.Old[at].Reclaimed {
			return e, false
		}
		e.Old = slices.DeleteFunc(slices.Clone(e.Old), func(o OldVersion) bool { return o.Fingerprint == f })
		e.Old = newest(append(e.Old, OldVersion{Fingerprint: f, Weights: weights}))
	default:
		return e.Next(weights, f), true
	}
	return e, true
}

// Next begins an epoch with weights, which may be those of an earlier one; the zero
// fingerprint stands for none.
func (e Epoch) Next(weights string, f Fingerprint) Epoch {
	next := Epoch{Model: e.Model, Number: e.Number + 1, Weights: weights}
	if e.Number > 0 {
		next.Past = slices.DeleteFunc(slices.Clone(e.Past), func(w string) bool { return w == weights })
		next.Past = append(next.Past, e.Weights)
		next.Past = next.Past[max(0, len(next.Past)-mostPast):]
	}
	for _, o := range e.Old {
		if o.Weights == weights {
			next.Fingerprints = append(next.Fingerprints, o.Fingerprint)
		} else {
			next.Old = append(next.Old, o)
		}
	}
	for _, was := range e.Fingerprints {
		next.Old = append(next.Old, OldVersion{Fingerprint: was, Weights: e.Weights})
	}
	next.Old = newest(next.Old)
	if f != (Fingerprint{}) && !slices.Contains(next.Fingerprints, f) {
		next.Fingerprints = append(next.Fingerprints, f)
	}
	next.Fingerprints = newest(next.Fingerprints)
	return next
}

// newest returns the last of a list, as many as are remembered. The others are found as
// long as they are there, and go when room is short.
func newest[T any](list []T) []T { return list[max(0, len(list)-mostVersions):] }

// Merged returns the newer of two records of one model, into which goes what only the other
// one knows to be there.
func (e Epoch) Merged(other Epoch) Epoch {
	if other.Number <= e.Number {
		return e
	}
	if e.Number == 0 {
		return other
	}
	for _, f := range append([]Fingerprint{{}}, e.Fingerprints...) {
		other, _ = other.Announced(e.Weights, f)
	}
	return other
}

// WithReclaimed returns the record after the room of an old version was given back.
func (e Epoch) WithReclaimed(f Fingerprint) Epoch {
	e.Old = slices.Clone(e.Old)
	for i := range e.Old {
		if e.Old[i].Fingerprint == f {
			e.Old[i].Reclaimed = true
		}
	}
	return e
}

// MarshalText implements encoding.TextMarshaler.
func (f Fingerprint) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *Fingerprint) UnmarshalText(text []byte) error {
	k, err := ParseKey(string(text))
	*f = Fingerprint(k)
	return err
}
