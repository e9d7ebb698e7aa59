package h2

import (
	"golang.org/x/net/http2"
)

// frame takes one frame of the peer.
func (c *conn) frame(f http2.Frame) error {
	if s, ok := f.(*http2.SettingsFrame); ok {
		return c.settings(s)
	}
	if !c.settled { // set by this goroutine only
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.data(f)
	case *http2.MetaHeadersFrame:
		return c.role.headers(f)
	case *http2.WindowUpdateFrame:
		return c.windowUpdate(f)
	case *http2.RSTStreamFrame:
		return c.rst(f)
	case *http2.PingFrame:
		c.mu.Lock()
		defer c.mu.Unlock()
		if f.IsAck() {
			c.role.pongLocked()
			return nil
		}
		return c.controlLocked(c.fr.WritePing(true, f.Data))
	case *http2.GoAwayFrame:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.role.goAwayLocked(f)
	case *http2.PushPromiseFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil // priorities, and what is not known
}

// settings takes the peer's SETTINGS.
func (c *conn) settings(f *http2.SettingsFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.IsAck() {
		return nil
	}
	if f.HasDuplicates() {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if err := f.ForeachSetting(c.settingLocked); err != nil {
		return err
	}
	if !c.settled {
		c.settled = true
		c.role.settledLocked()
	}
	c.moveLocked()
	return c.controlLocked(c.fr.WriteSettingsAck())
}

func (c *conn) settingLocked(s http2.Setting) error {
	if err := s.Valid(); err != nil {
		return err
	}
	switch s.ID {
	case http2.SettingHeaderTableSize:
		c.enc.SetMaxDynamicTableSize(min(s.Val, hpackTable))
	case http2.SettingMaxConcurrentStreams:
		c.peer.streams = s.Val
	case http2.SettingMaxFrameSize:
		c.peer.frame = int(min(s.Val, mostPending))
	case http2.SettingInitialWindowSize:
		more := int64(s.Val) - c.peer.window
		c.peer.window = int64(s.Val)
		for _, st := range c.streams {
			if st.window += more; st.window > mostWindow {
				return http2.ConnectionError(http2.ErrCodeFlowControl)
			}
			c.listLocked(st)
		}
	}
	return nil
}

// idleLocked says that nobody has begun that stream yet.
func (c *conn) idleLocked(id uint32) bool { return id > c.last || id%2 == 0 }

// data takes a part of a body. What is for a stream that is over is dropped.
func (c *conn) data(f *http2.DataFrame) error {
	c.mu.Lock()
	n := int64(f.Length)
	s := c.streams[f.StreamID]
	if n > c.recvWindow {
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.recvWindow -= n
	if s == nil {
		defer c.mu.Unlock()
		if c.idleLocked(f.StreamID) {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		c.giveLocked(n)
		c.batch.add(c)
		return nil
	}
	if err := s.receiveLocked(f.Data(), n, f.StreamEnded()); err != nil {
		c.giveLocked(n)
		c.mu.Unlock()
		return err
	}
	inline := s.inline
	if inline == nil {
		s.changed.Broadcast()
		if len(c.out) > 0 { // padding was given back
			c.batch.add(c)
		}
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	if !inline(&c.batch) {
		c.mu.Lock()
		s.poked = true
		s.changed.Broadcast()
		c.mu.Unlock()
	}
	return nil
}

// giveLocked gives n bytes of the connection's window back to the peer.
func (c *conn) giveLocked(n int64) {
	c.taken += n
	if c.taken >= c.share/4 {
		_ = c.fr.WriteWindowUpdate(0, uint32(c.taken))
		c.recvWindow += c.taken
		c.taken = 0
	}
}

func (c *conn) windowUpdate(f *http2.WindowUpdateFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.StreamID == 0 {
		if c.sendWindow += int64(f.Increment); c.sendWindow > mostWindow {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
	} else if s := c.streams[f.StreamID]; s != nil {
		if s.window += int64(f.Increment); s.window > mostWindow {
			return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeFlowControl}
		}
		c.listLocked(s)
	} else if c.idleLocked(f.StreamID) {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.moveLocked()
	c.batch.add(c)
	return nil
}

func (c *conn) rst(f *http2.RSTStreamFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[f.StreamID]
	switch {
	case s != nil:
		s.endLocked(http2.StreamError{StreamID: s.id, Code: f.ErrCode, Cause: errReset})
	case c.idleLocked(f.StreamID):
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

// listLocked notes a stream that has something to send which its own window lets pass.
func (c *conn) listLocked(s *stream) {
	if !s.listed && !s.sent && (len(s.queue) > 0 && s.window > 0 || len(s.queue) == 0 && s.last) {
		s.listed = true
		c.ready = append(c.ready, s)
	}
}

// moveLocked makes frames of what streams have to send, one of each in turn, as long as
// there is room for them.
func (c *conn) moveLocked() {
	for len(c.ready) > 0 && len(c.out) < mostPending {
		s := c.ready[0]
		if len(s.queue) > 0 && c.sendWindow <= 0 {
			return
		}
		if c.ready[0] = nil; len(c.ready) == 1 {
			c.ready = c.ready[:0] // the usual one has its place for the next token, too
		} else {
			c.ready = c.ready[1:]
		}
		s.listed = false
		s.frameLocked()
		c.listLocked(s)
	}
}
