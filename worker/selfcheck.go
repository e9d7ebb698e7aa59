package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker/gpu"
)

const (
	// checkPatience is how long an idle engine may take for one token.
	checkPatience = time.Minute
	// checkAgain is the longest pause after a failed self-check.
	checkAgain = 5 * time.Second
	// hardwareEvery is how often the GPUs' faults are looked at.
	hardwareEvery = 250 * time.Millisecond
)

// keepChecking has the engine generate a token, makes the worker ready, and from
// then on repeats it whenever nothing was asked of the engine for SelfCheck. It
// also announces when the GPUs' faults come or go. It ends with ctx.
func (s *Server) keepChecking(ctx context.Context, e Engine) {
	if s.cfg.SelfCheck < 0 {
		s.becomeReady(e)
	} else if !s.firstChecks(ctx, e) {
		return
	}
	tick := time.NewTicker(hardwareEvery)
	defer tick.Stop()
	last, fault := time.Now(), ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := s.hardware(); now != fault {
			fault = now
			s.life.announce()
			s.tellHealth()
		}
		if s.cfg.SelfCheck < 0 {
			continue
		}
		switch {
		case !s.life.quiet():
			last = time.Now() // requests that run tell more than a check
		case time.Since(last) >= s.pause():
			s.check(ctx, e)
			last = time.Now()
		}
	}
}

// pause is the time between two checks, shorter while they fail.
func (s *Server) pause() time.Duration {
	if s.life.healthy() {
		return s.cfg.SelfCheck
	}
	return min(s.cfg.SelfCheck, checkAgain)
}

// firstChecks tries until the engine generates; ready reports whether it did
// before ctx ended.
func (s *Server) firstChecks(ctx context.Context, e Engine) (ready bool) {
	for !s.check(ctx, e) {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(s.pause()):
		}
	}
	s.becomeReady(e)
	return true
}

// becomeReady lets requests in.
func (s *Server) becomeReady(e Engine) {
	s.metrics.coldStart.Set(time.Since(s.started).Seconds())
	s.life.loaded(e)
	s.tellHealth()
	s.cfg.Log.Info("worker serves", "id", s.cfg.ID, "addr", s.Addr(), "model", s.modelName(), "after", time.Since(s.started).Round(time.Millisecond))
}

// check generates one token and notes how it went.
func (s *Server) check(ctx context.Context, e Engine) (ok bool) {
	err := s.generateOne(ctx, e)
	if ctx.Err() != nil {
		return false // stopping says nothing about the engine
	}
	if err != nil {
		s.metrics.checksFailed.Inc()
		s.cfg.Log.Error("self-check failed", "err", err)
		err = fmt.Errorf("self-check failed: %w", err)
	}
	s.metrics.checks.Inc()
	s.life.checked(e, err)
	s.tellHealth()
	return err == nil
}

// checkBody is the request of a self-check, as a client would send it.
const checkBody = `{"model":"self-check","prompt":"1","max_tokens":1,"temperature":0}`

// generateOne asks the engine for one token. A panic is an error.
func (s *Server) generateOne(ctx context.Context, e Engine) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Log.Error("panic in a self-check", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = errors.New("the engine panicked")
		}
	}()
	req, bad := openai.Parse(openai.Completions, []byte(checkBody))
	if bad != nil {
		return bad
	}
	ids, err := e.Tokenize(req, 0)
	if err != nil {
		return fmt.Errorf("tokenize: %w", err)
	}
	late := fmt.Errorf("no token within %v", checkPatience)
	ctx, cancel := context.WithTimeoutCause(ctx, checkPatience, late)
	defer cancel()
	err = errors.New("the engine generated nothing")
	for _, err = range e.Generate(ctx, ids, Params{MaxTokens: 1, TopP: 1, TopLogprobs: -1}) {
		break
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// worstGPU is what the worst of the devices tells.
func worstGPU(devices []gpu.Device) (worst health.GPU) {
	for _, d := range devices {
		worst = worst.Worse(d.Facts())
	}
	return worst
}
