package main

import (
	"net/url"
	"strings"
)

// baseURL checks the URL of a part of the mesh, which from names as the user gave
// it: a flag or a variable. A missing scheme is http. "" stays "".
func baseURL(from, text string) (string, error) {
	if text == "" {
		return "", nil
	}
	u, err := url.Parse(withScheme(text))
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || strings.Trim(u.Path, "/") != "" {
		return "", withHint(usagef("%s %q is not the URL of a server", from, text), "write it like http://127.0.0.1:9000")
	}
	return u.Scheme + "://" + u.Host, nil
}

// withScheme puts http:// before an address without a scheme.
func withScheme(text string) string {
	if strings.Contains(text, "://") {
		return text
	}
	return "http://" + text
}
