package main

import (
	"net"
	"strings"
	"testing"
)

// A control plane that takes the connection and says nothing is told from one that is
// away, with what to do about it.
func TestLookAtAHungPart(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	hung := "http://" + l.Addr().String()
	for _, args := range [][]string{{"workers", "--api", hung}, {"inspect", "--api", hung}, {"streams", "--gateway", hung}} {
		t.Run(args[0], func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := command(t, t.Context(), args...)
			if code != 1 || stdout != "" || !strings.Contains(stderr, hung+" does not answer within 2.5s") || !strings.Contains(stderr, "hint: requests are served meanwhile") {
				t.Errorf("exit %d, %s%s", code, stdout, stderr)
			}
		})
	}
	code, _, stderr := command(t, t.Context(), "workers", "--api", "127.0.0.1:1")
	if code != 1 || strings.Contains(stderr, "does not answer") || !strings.Contains(stderr, "hint: is the control plane up") {
		t.Errorf("one that is away: exit %d, %s", code, stderr)
	}
}
