package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Faults of a drill.
const (
	faultKill    = "kill"
	faultHang    = "hang"
	faultDrain   = "drain"
	faultCorrupt = "corrupt"
	faultSlow    = "slow"
	faultZone    = "zone"
)

// faultNames lists them in the order of the help text.
func faultNames() []string {
	return []string{faultKill, faultHang, faultDrain, faultCorrupt, faultSlow, faultZone}
}

// harm does one fault and sets right what can be.
type harm struct {
	d      *driller
	fault  string
	list   []fleet.WorkerView
	worker string    // that it was done to
	at     time.Time // when
	undos  []func()  // last first
}

// undo sets right what can be. It may be called more than once.
func (h *harm) undo() {
	for _, f := range slices.Backward(h.undos) {
		f()
	}
	h.undos = nil
}

// do harms the worker that gives the answer now.
func (h *harm) do(ctx context.Context, got *heard) error {
	h.worker = got.worker
	if v, ok := h.d.look(ctx, got.stream); ok {
		h.worker = v.Worker
	}
	i := slices.IndexFunc(h.list, func(w fleet.WorkerView) bool { return w.ID == h.worker })
	if i < 0 {
		return fmt.Errorf("worker %q gives the answer, and the control plane does not know it", h.worker)
	}
	w := h.list[i]
	if err := isHere(w); err != nil && h.fault != faultDrain {
		return withHint(fmt.Errorf("%s cannot be done from here: %w", h.fault, err), "`kvmesh drill drain` needs no process of this machine")
	}
	defer func() { h.at = time.Now() }()
	switch h.fault {
	case faultKill:
		h.d.note("kill -9 %d (%s)", w.PID, w.ID)
		return signalWorker(w, syscall.SIGKILL)
	case faultHang:
		h.d.note("kill -STOP %d (%s)", w.PID, w.ID)
		h.undos = append(h.undos, func() { _ = signalWorker(w, syscall.SIGCONT) }) // it may have been killed meanwhile
		return signalWorker(w, syscall.SIGSTOP)
	case faultDrain:
		h.d.note("drain %s", w.ID)
		return h.drain(ctx, w)
	case faultCorrupt:
		return h.corrupt(w)
	case faultSlow:
		h.d.note("%s (process %d) runs a tenth of the time now", w.ID, w.PID)
		h.slow(w)
		return nil
	}
	return h.zone(w)
}

// drain drains the worker until the drill is over. One that an operator had drained
// before takes no requests, so it is never the worker of a drill.
func (h *harm) drain(ctx context.Context, w fleet.WorkerView) error {
	h.undos = append(h.undos, func() {
		if err := h.d.client.Drain(context.WithoutCancel(ctx), w.ID, false); err != nil {
			h.d.note("%s is still drained: %v", w.ID, err)
		}
	})
	return h.d.client.Drain(ctx, w.ID, true)
}

// zone kills all workers of the worker's zone.
func (h *harm) zone(of fleet.WorkerView) error {
	all := slices.DeleteFunc(slices.Clone(h.list), func(w fleet.WorkerView) bool { return w.Zone != of.Zone })
	var errs []error
	for _, w := range all {
		errs = append(errs, isHere(w))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("the whole zone %q cannot be killed from here: %w", of.Zone, err)
	}
	for _, w := range all {
		h.d.note("kill -9 %d (%s, zone %s)", w.PID, w.ID, w.Zone)
		errs = append(errs, signalWorker(w, syscall.SIGKILL))
	}
	return errors.Join(errs...)
}

// slow lets the worker run for 20 ms of every 200 ms until it is undone.
func (h *harm) slow(w fleet.WorkerView) {
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		defer func() { _ = signalWorker(w, syscall.SIGCONT) }() // it may be gone
		for {
			for _, turn := range []struct {
				signal syscall.Signal
				length time.Duration
			}{{syscall.SIGSTOP, 180 * time.Millisecond}, {syscall.SIGCONT, 20 * time.Millisecond}} {
				_ = signalWorker(w, turn.signal) // it may be gone
				select {
				case <-stop:
					return
				case <-time.After(turn.length):
				}
			}
		}
	})
	h.undos = append(h.undos, func() { close(stop); done.Wait() })
}

// corrupt flips a byte in the middle of everything that is stored of KV, then kills
// the worker: whoever goes on must find that out and compute it anew.
func (h *harm) corrupt(w fleet.WorkerView) error {
	if h.d.mesh.KVDir == "" {
		return withHint(errors.New("where the workers keep their KV is not known"), "run the drill in the folder of `kvmesh up`, with Mesh.spec.kv.dir not off")
	}
	if isKVNode(h.d.mesh.KVDir) {
		n, err := spoilArena(filepath.Join(h.d.mesh.KVDir, "arena"))
		if err != nil {
			return fmt.Errorf("spoil the KV node's memory: %w", err)
		}
		h.d.note("the KV node's memory spoiled at %d places; kill -9 %d (%s)", n, w.PID, w.ID)
		return signalWorker(w, syscall.SIGKILL)
	}
	n := 0
	err := filepath.WalkDir(h.d.mesh.KVDir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil // removed meanwhile
		}
		if flip(path) == nil {
			n++
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("spoil the stored KV: %w", err)
	}
	h.d.note("%d files of KV spoiled; kill -9 %d (%s)", n, w.PID, w.ID)
	return signalWorker(w, syscall.SIGKILL)
}

// spoilEvery is the distance of the bytes that spoilArena changes: shorter than a block.
const spoilEvery = 16 << 10

// spoilArena changes one byte of every few thousand in the memory of a KV node, but for
// its header, and says how many.
func spoilArena(path string) (n int, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	var b [1]byte
	for at := int64(spoilEvery / 2); at < info.Size(); at += spoilEvery {
		if _, err := f.ReadAt(b[:], at); err != nil {
			return n, err
		}
		b[0] ^= 0x55
		if _, err := f.WriteAt(b[:], at); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// flip changes one byte in the middle of a file.
func flip(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], info.Size()/2); err != nil {
		return err
	}
	b[0] ^= 0x55
	_, err = f.WriteAt(b[:], info.Size()/2)
	return err
}
