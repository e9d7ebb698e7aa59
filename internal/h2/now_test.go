package h2

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// socketPair is two ends of a connection, and now on the first.
func socketPair(t *testing.T) (w *now, here, there *net.UnixConn) {
	t.Helper()
	lis, dial := listen(t)
	nc, err := dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() }) // it may be closed already
	other, err := lis.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	w = &now{}
	if w.init(nc); !w.can() {
		t.Fatal("a socket cannot be read and written without waiting")
	}
	return w, nc.(*net.UnixConn), other.(*net.UnixConn)
}

// A read takes what is there, waits for what is not, and ends with what the peer has sent.
func TestNowRead(t *testing.T) {
	w, _, there := socketPair(t)
	p := make([]byte, 8)
	read := func(want string) {
		t.Helper()
		if n, err := w.read(p); err != nil || string(p[:n]) != want {
			t.Fatalf("read %q, %v, want %q", p[:n], err, want)
		}
	}
	write := func(s string) {
		if _, err := io.WriteString(there, s); err != nil {
			t.Error(err)
		}
	}
	write("what is there")
	read("what is ")
	read("there")
	began, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		<-began
		write("late")
		if err := there.CloseWrite(); err != nil {
			t.Error(err)
		}
	}()
	close(began)
	read("late")
	<-done
	for range 2 {
		if n, err := w.read(p); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("after the end: %d bytes, %v", n, err)
		}
	}
}

// A reader that is kept busy reads all, in order.
func TestNowReadBusy(t *testing.T) {
	w, _, there := socketPair(t)
	const rounds = 3 * mostBusy
	for i := range rounds {
		if _, err := there.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	p := make([]byte, 1)
	for i := range rounds {
		if n, err := w.read(p); n != 1 || err != nil || p[0] != byte(i) {
			t.Fatalf("read %d: %d bytes, %v, %v", i, n, p, err)
		}
	}
	if w.busy != rounds {
		t.Errorf("%d reads in a row, want %d", w.busy, rounds)
	}
	done := make(chan error)
	go func() { _, err := there.Write([]byte{1}); done <- err }()
	_, err := w.read(p)
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
}

// A deadline and a Close end the wait of a read.
func TestNowReadEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(*net.UnixConn) error
		want error
	}{
		"deadline": {func(c *net.UnixConn) error { return c.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"close":    {(*net.UnixConn).Close, net.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			w, here, _ := socketPair(t)
			done := make(chan error)
			go func() {
				_, err := w.read(make([]byte, 1))
				done <- err
			}()
			if err := tc.end(here); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// A write takes what there is room for, which may be nothing, and fails when nobody reads
// any more.
func TestNowWrite(t *testing.T) {
	w, _, there := socketPair(t)
	p, sent := bytes.Repeat([]byte("token "), 10_000), 0
	for {
		n, err := w.write(p)
		if err != nil {
			t.Fatal(err)
		}
		if sent += n; n == 0 {
			break
		}
	}
	got, err := io.CopyN(io.Discard, there, int64(sent))
	if err != nil || got != int64(sent) {
		t.Errorf("%d bytes came of %d: %v", got, sent, err)
	}
	if n, err := w.write(p[:1]); n != 1 || err != nil {
		t.Errorf("with room again: %d bytes, %v", n, err)
	}
	if err := there.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := w.write(p); n != 0 || err == nil {
		t.Errorf("to nobody: %d bytes, %v", n, err)
	}
	if _, err := w.read(p); err == nil {
		t.Error("read from nobody")
	}
}
