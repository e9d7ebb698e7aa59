// Package wasm will hold the optional edge filter. It holds nothing yet; Envoy's
// routes already honour the header it will set (names.Model).
package wasm
