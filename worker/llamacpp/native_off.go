//go:build nollamacpp || !(linux || darwin) || !(amd64 || arm64)

package llamacpp

import (
	"context"
	"errors"
)

// load refuses: this build has no binding to llama.cpp.
func load(context.Context, *Config) (parts, error) {
	return parts{}, errors.New("this build has no llama.cpp: it was built with the tag nollamacpp, or for a system without the binding")
}
