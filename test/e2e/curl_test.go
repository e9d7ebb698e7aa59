package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// standInForCurl gives scripts a curl where the machine has none: this test binary, which
// knows the flags that the scripts use.
func standInForCurl(e *testscript.Env) error {
	if _, err := exec.LookPath("curl"); err == nil {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir := filepath.Join(e.WorkDir, ".bin")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	e.Setenv("PATH", dir+string(os.PathListSeparator)+e.Getenv("PATH"))
	return os.Symlink(self, filepath.Join(dir, "curl"))
}

// asCurl plays curl when this binary is called so.
func asCurl() {
	if filepath.Base(os.Args[0]) != "curl" {
		return
	}
	if err := curl(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "curl:", err)
		os.Exit(22)
	}
	os.Exit(0)
}

// headerFlag collects -H.
type headerFlag struct{ http.Header }

// String implements flag.Value.
func (h headerFlag) String() string { return "" }

// Set implements flag.Value.
func (h headerFlag) Set(s string) error {
	name, value, _ := strings.Cut(s, ":")
	h.Add(name, strings.TrimSpace(value))
	return nil
}

func curl(args []string) error {
	f := flag.NewFlagSet("curl", flag.ContinueOnError)
	h := headerFlag{http.Header{}}
	for _, name := range []string{"s", "N", "sN"} {
		f.Bool(name, false, "")
	}
	fail := f.Bool("sf", false, "")
	h2 := f.Bool("http2-prior-knowledge", false, "")
	most := f.Int("m", 600, "")
	method := f.String("X", "", "")
	format, out, data := f.String("w", "", ""), f.String("o", "", ""), f.String("d", "", "")
	f.StringVar(data, "data-binary", "", "")
	f.Var(h, "H", "")
	var target string
	for rest := args; len(rest) > 0; { // curl takes flags behind the URL, too
		if err := f.Parse(rest); err != nil {
			return err
		}
		if rest = f.Args(); len(rest) > 0 {
			target, rest = rest[0], rest[1:]
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*most)*time.Second)
	defer cancel()
	req, err := curlRequest(ctx, target, *data, h.Header)
	if err != nil {
		return err
	}
	req.Method = cmp.Or(*method, req.Method)
	p := &http.Protocols{}
	p.SetHTTP1(!*h2)
	p.SetUnencryptedHTTP2(*h2)
	resp, err := (&http.Transport{Protocols: p, DisableCompression: true, ExpectContinueTimeout: time.Second}).RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if *fail && resp.StatusCode >= 400 {
		return errors.New(resp.Status)
	}
	var to io.Writer = os.Stdout
	if *out != "" {
		file, err := os.Create(*out)
		if err != nil {
			return err
		}
		defer file.Close()
		to = file
	}
	_, err = io.Copy(to, resp.Body)
	fmt.Print(strings.NewReplacer("%{http_code}", fmt.Sprint(resp.StatusCode), `\n`, "\n").Replace(*format))
	return err
}

// curlRequest makes the request; the path goes out as it is, however it is written.
func curlRequest(ctx context.Context, target, data string, h http.Header) (*http.Request, error) {
	method, body := http.MethodGet, []byte(nil)
	if data != "" {
		method, body = http.MethodPost, []byte(data)
	}
	var err error
	switch name, file := strings.CutPrefix(data, "@"); {
	case data == "@-":
		body, err = io.ReadAll(os.Stdin)
	case file:
		body, err = os.ReadFile(name)
	}
	if err != nil {
		return nil, err
	}
	_, rest, _ := strings.Cut(target, "://")
	host, path, _ := strings.Cut(rest, "/")
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = h
	if h.Get("Transfer-Encoding") != "" {
		h.Del("Transfer-Encoding")
		req.ContentLength = -1
	}
	if u, err := url.Parse("http://" + host + "/" + path); err == nil {
		req.URL = u
	} else {
		req.URL.Opaque = "//" + host + "/" + path
	}
	return req, nil
}
