package worker_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// slowEmbedder makes no embedding before its request ends.
type slowEmbedder struct{ *sim.Engine }

func (slowEmbedder) Embed(ctx context.Context, _ []int32) ([]float32, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// halfClose sends a request, closes the sending side and returns all that comes back.
func halfClose(t *testing.T, addr, path, body string) string {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	return string(got)
}

// A client that has only closed its sending side looks like one that left. It may be cut
// off, but must not get what looks like a whole answer and is none.
func TestHalfClosedClientsGetNoFalseSuccess(t *testing.T) {
	e := slowEmbedder{newSim(t, sim.Config{})}
	r := &running{engine: e.Engine}
	r.run(t, worker.Config{Open: opener(e)})
	<-r.Changed()
	for path, body := range map[string]string{
		textPath:         `{"model":"sim","prompt":"x","max_tokens":30,"sim":{"stall_at":5}}`,
		chatPath:         `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":30,"sim":{"stall_at":0}}`,
		"/v1/embeddings": `{"model":"sim","input":"x"}`,
	} {
		if got := halfClose(t, r.Addr(), path, body); got != "" {
			t.Errorf("%s: the answer is\n%s", path, got)
		}
	}
	got := halfClose(t, r.Addr(), textPath, `{"model":"sim","prompt":"x","max_tokens":30,"stream":true,"sim":{"stall_at":5}}`)
	if strings.HasSuffix(got, "\r\n0\r\n\r\n") {
		t.Errorf("a cut stream ends like a whole one:\n%s", got)
	}
}
