//go:build unix

package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// errGone closes the connection of a client that would wait for the rest of an answer.
var errGone = errors.New("a value that the client counts on is not there")

// command does one command. An error ends the connection.
func (p *peer) command(ctx context.Context, name string) error {
	if !p.known && name != "AUTH" && name != "QUIT" {
		p.fail("NOAUTH Authentication required.")
		return p.in.drop()
	}
	switch name {
	case "SET":
		return p.set(ctx)
	case "GET":
		return p.one(ctx, p.get)
	case "EXISTS":
		return p.each(ctx, p.s.exists)
	case "DEL":
		return p.each(ctx, p.s.del)
	}
	p.common = p.common || name != "AUTH"
	most := mostArg
	if !p.known {
		if most = mostName; p.in.left > mostLogin {
			return fmt.Errorf("%w: %d strings before the password", errProtocol, p.in.left)
		}
	}
	args, err := p.in.argsOf(most)
	if err != nil {
		return err
	}
	switch {
	case name == "AUTH" && (len(args) == 1 || len(args) == 2):
		if p.known = p.s.login(args[len(args)-1]); !p.known {
			p.fail("WRONGPASS invalid username-password pair or user is disabled.")
			return nil
		}
		p.text("OK")
	case name == "PING" && len(args) == 0:
		p.text("PONG")
	case name == "PING" && len(args) == 1:
		p.bulk(args[0])
	case name == "INFO":
		p.info()
	case name == "QUIT":
		p.text("OK")
		return net.ErrClosed
	case name == "AUTH", name == "PING":
		p.wrongNumber(name)
	default:
		p.fail(fmt.Sprintf("ERR unknown command '%.32s'", clean(name)))
	}
	return nil
}

// clean makes a text one that fits in one line.
func clean(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c < ' ' || c > '~' {
			b[i] = '?'
		}
	}
	return string(b)
}

func (p *peer) wrongNumber(name string) {
	p.fail("ERR wrong number of arguments for '" + name + "' command")
}

// one does a command with one key.
func (p *peer) one(ctx context.Context, do func(context.Context, string) error) error {
	args, err := p.in.args()
	if err != nil {
		return err
	}
	if len(args) != 1 {
		p.wrongNumber("get")
		return nil
	}
	return do(ctx, args[0])
}

// each does a command with keys, which are counted for which it says yes.
func (p *peer) each(ctx context.Context, do func(context.Context, string) (bool, error)) error {
	args, err := p.in.args()
	if err != nil {
		return err
	}
	if len(args) == 0 {
		p.wrongNumber("this")
		return nil
	}
	n := 0
	for _, key := range args {
		yes, err := do(ctx, key)
		if err != nil {
			p.fail("ERR " + clean(err.Error()))
			return nil
		}
		if yes {
			n++
		}
	}
	p.number(n)
	return nil
}

// set reads a value to where it stays.
func (p *peer) set(ctx context.Context) error {
	if p.in.left != 2 {
		p.fail("ERR syntax error: SET KEY VALUE, without options")
		return p.in.drop()
	}
	key, err := p.in.arg()
	if err != nil {
		return err
	}
	n, err := p.in.begin()
	if err != nil {
		return err
	}
	ref, ids := p.s.ref(key)
	head := kvcache.HeaderLen(len(ids), 1)
	p.s.forget(ref.Key)
	if _, err := p.s.cfg.Store.Remove(ctx, ref); err != nil {
		p.fail("ERR " + clean(err.Error()))
		return p.in.skip(n)
	}
	r, err := p.s.cfg.Store.Reserve(ctx, ref, int64(head+n))
	switch {
	case errors.Is(err, kvcache.ErrFull):
		p.fail("OOM command not allowed: there is no room")
		return p.in.skip(n)
	case err != nil:
		p.fail("ERR " + clean(err.Error()))
		return p.in.skip(n)
	case r == nil: // somebody else was faster
		p.text("OK")
		return p.in.skip(n)
	}
	defer r.Cancel()
	if err := p.in.fill(r.Bytes()[head:]); err != nil {
		return err
	}
	if _, err = kvcache.Seal(r.Bytes(), kvcache.Meta{Space: p.s.space, Parent: p.s.space.Root, IDs: ids}, []kvcache.Part{{Size: int64(n)}}); err == nil {
		_, err = r.Commit()
	}
	if err != nil {
		p.fail("ERR " + clean(err.Error()))
		return nil
	}
	p.text("OK")
	return nil
}

// get sends a value from where it is.
func (p *peer) get(ctx context.Context, key string) error {
	ref, _ := p.s.ref(key)
	l, err := p.s.cfg.Store.Get(ctx, ref)
	var value []byte
	if err == nil {
		defer l.Release()
		value, err = l.Payload()
	}
	if err != nil {
		if !p.common || p.s.promised(ref.Key) {
			return errGone
		}
		p.w.WriteString("$-1\r\n")
		return nil
	}
	p.w.WriteString("$" + strconv.Itoa(len(value)) + "\r\n")
	if err := p.flush(); err != nil {
		return err
	}
	parts := net.Buffers{value, []byte("\r\n")}
	_, err = parts.WriteTo(p.c)
	return err
}

// exists says whether there is a value, and has it stay for a while.
func (s *Server) exists(ctx context.Context, key string) (bool, error) {
	ref, _ := s.ref(key)
	l, err := s.cfg.Store.Get(ctx, ref)
	if err != nil {
		return false, nil // wrong is missing
	}
	if l.Verify() != nil {
		l.Release()
		return false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.leases[ref.Key]
	if have == nil && len(s.leases) >= mostLeases {
		l.Release()
		return true, nil
	}
	if have != nil {
		s.releaseLocked(have)
	}
	s.leases[ref.Key] = s.holdLocked(l, time.Now().Add(s.cfg.Lease))
	return true, nil
}

// promised says whether somebody was told that a value is there.
func (s *Server) promised(key kvcache.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leases[key] != nil
}

// forget ends the lease of a key that is to have no value, or another one.
func (s *Server) forget(key kvcache.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[key]; l != nil {
		s.releaseLocked(l)
		delete(s.leases, key)
	}
}

// del removes a value and says whether there was one.
func (s *Server) del(ctx context.Context, key string) (bool, error) {
	ref, _ := s.ref(key)
	s.forget(ref.Key)
	return s.cfg.Store.Remove(ctx, ref)
}

// info says what clients look for.
func (p *peer) info() {
	st := p.s.cfg.Store.Stats()
	p.bulk(fmt.Sprintf("# Server\r\nredis_version:7.0.0\r\nserver_name:kvmesh\r\nredis_mode:standalone\r\n# Memory\r\nused_memory:%d\r\nmaxmemory:%d\r\n"+
		"# Stats\r\nkeyspace_hits:%d\r\nkeyspace_misses:%d\r\nevicted_keys:%d\r\n", st.Used, st.Limit, st.Hits, st.Misses, st.Evictions))
}
