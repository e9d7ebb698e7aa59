// Package policy holds the documents that say what the mesh should do, their
// defaults and their checks. A document is a Kubernetes-shaped YAML object:
// apiVersion, kind, metadata.name and spec. Unknown fields and bad values are
// errors that name the file, the line and, for a typo, the nearest right name.
//
// Parse is pure; reading files is the caller's. A *Set is read-only after Parse.
package policy
