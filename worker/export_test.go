package worker

// Changed gets an element when the worker's state has changed, for tests that
// wait until it is ready. The registrar takes the elements where there is one.
func (s *Server) Changed() <-chan struct{} { return s.life.changed }

// ErrShutdown is the cause with which a drain ends what still runs.
var ErrShutdown = errShutdown
