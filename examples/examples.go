// Package examples embeds the policy files of this folder, so that the binary
// can show them and start them without a checkout.
package examples

import "embed"

// Files holds the YAML files by name.
//
//go:embed *.yaml
var Files embed.FS
