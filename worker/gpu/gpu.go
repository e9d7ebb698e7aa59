// Package gpu reads how the GPUs of this machine are: memory, utilization, heat,
// power, what slows them, and the errors after which they must not be trusted.
//
// It calls NVIDIA's management library directly, without cgo, and only the
// functions named in nvml.go. On a machine without the library Open returns
// ErrAbsent.
//
// # Pace
//
// A Probe reads every device once per Every and keeps the result, so that asking
// costs nothing and a driver that hangs holds up nobody but the Probe. XID errors
// come as events, the moment the driver reports them.
package gpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
)

// ErrAbsent says that there is no GPU that could be read.
var ErrAbsent = errors.New("no GPU to read")

// Device is one GPU at one moment. A fact that the device cannot tell is zero.
type Device struct {
	Index         int      `json:"index"` // NVML's, which is not CUDA's
	UUID          string   `json:"uuid"`
	Name          string   `json:"name,omitempty"`
	MemoryUsedMB  uint64   `json:"memory_used_mb"`  // MiB, as nvidia-smi shows them
	MemoryTotalMB uint64   `json:"memory_total_mb"` // MiB
	Utilization   float64  `json:"utilization"`     // 0..1, share of time with work
	TemperatureC  float64  `json:"temperature_c"`
	PowerW        float64  `json:"power_w"`
	Throttle      []string `json:"throttle,omitempty"` // what slows it now, see Reasons
	Throttled     float64  `json:"throttled"`          // 0..1, share of the last readings slowed by heat or lack of power
	ECCTotal      uint64   `json:"ecc_uncorrectable"`  // since the driver was loaded
	ECC           uint64   `json:"ecc_new"`            // uncorrectable since the Probe was opened
	RemapPending  bool     `json:"row_remap_pending,omitempty"`
	RemapFailed   bool     `json:"row_remap_failed,omitempty"`
	XID           int      `json:"xid"`       // last since the Probe was opened, 0 for none
	FatalXID      int      `json:"fatal_xid"` // last fatal one, see health.FatalXID
	Lost          bool     `json:"lost,omitempty"`
	Reasons       uint64   `json:"-"` // NVML's bit field behind Throttle
}

// Facts is the part of a Device that decides whether it can be trusted.
func (d Device) Facts() health.GPU {
	return health.GPU{
		Lost: d.Lost, XID: d.FatalXID, ECC: float64(d.ECC), RemapFailed: d.RemapFailed, Throttled: d.Throttled,
	}
}

// library is what a Probe needs of NVML.
type library interface {
	// Count returns how many devices there are; they have the indices below it.
	Count() (int, error)
	// Read fills in what the device tells now. An error says that it told nothing.
	Read(index int) (Device, error)
	// WaitXID waits up to timeout for an XID event of any device; xid is 0 when none
	// came. An error says that there will be no events.
	WaitXID(timeout time.Duration) (index, xid int, err error)
	// Close frees the library.
	Close() error
}

// Config says what a Probe reads.
type Config struct {
	// Devices names them by index or by UUID, of which the beginning is enough. Empty
	// takes all.
	Devices []string
	// Every is the time between two readings, default 1 s.
	Every time.Duration
	// Log takes XIDs and what cannot be read; nil discards.
	Log *slog.Logger
	// Path of the library, default libnvidia-ml.so.1 where the linker finds it.
	Path string
}

// Probe reads devices. Its methods are safe for concurrent use.
type Probe struct {
	lib   library
	cfg   Config
	index []int // of the devices to read

	mu       sync.Mutex
	devices  []Device
	baseline map[int]uint64 // index → uncorrectable errors at the first reading
	slow     map[int][]bool // index → whether each of the last readings was slowed
	xid      map[int]int    // index → last XID
	fatal    map[int]int    // index → last fatal XID
	silent   map[int]bool   // index → its failure to answer was logged
}

// window is how many readings Throttled looks back on.
const window = 10

// Open loads the library and reads every device once.
func Open(cfg Config) (*Probe, error) {
	lib, err := load(cfg.Path)
	if err != nil {
		return nil, err
	}
	p, err := open(cfg, lib)
	if err != nil {
		return nil, errors.Join(err, lib.Close())
	}
	return p, nil
}

// open makes a Probe over a library.
func open(cfg Config, lib library) (*Probe, error) {
	if cfg.Every == 0 {
		cfg.Every = time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Probe{
		lib: lib, cfg: cfg, baseline: map[int]uint64{}, slow: map[int][]bool{},
		xid: map[int]int{}, fatal: map[int]int{}, silent: map[int]bool{},
	}
	if err := p.choose(); err != nil {
		return nil, err
	}
	p.read()
	return p, nil
}

// choose settles which devices are read.
func (p *Probe) choose() error {
	n, err := p.lib.Count()
	if err != nil {
		return fmt.Errorf("count GPUs: %w", err)
	}
	if n == 0 {
		return fmt.Errorf("%w: the driver knows none", ErrAbsent)
	}
	if len(p.cfg.Devices) == 0 {
		for i := range n {
			p.index = append(p.index, i)
		}
		return nil
	}
	for _, want := range p.cfg.Devices {
		i, err := p.find(want, n)
		if err != nil {
			return err
		}
		if !slices.Contains(p.index, i) {
			p.index = append(p.index, i)
		}
	}
	slices.Sort(p.index)
	return nil
}

// find returns the index of the device that is meant.
func (p *Probe) find(want string, n int) (int, error) {
	if i, err := strconv.Atoi(want); err == nil {
		if i < 0 || i >= n {
			return 0, fmt.Errorf("GPU %d: there are %d, counted from 0", i, n)
		}
		return i, nil
	}
	found := -1
	for i := range n {
		d, err := p.lib.Read(i)
		if err != nil || want == "" || !strings.HasPrefix(d.UUID, want) {
			continue
		}
		if found >= 0 {
			return 0, fmt.Errorf("GPU %q: more than one UUID begins so", want)
		}
		found = i
	}
	if found < 0 {
		return 0, fmt.Errorf("GPU %q: no such UUID", want)
	}
	return found, nil
}

// Run reads until ctx ends, then closes the library. It must be called once.
func (p *Probe) Run(ctx context.Context) {
	var events sync.WaitGroup
	events.Go(func() { p.follow(ctx) })
	tick := time.NewTicker(p.cfg.Every)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			p.read()
		}
	}
	events.Wait()
	if err := p.lib.Close(); err != nil {
		p.cfg.Log.Warn("close NVML", "err", err)
	}
}

// follow takes XID events in until ctx ends.
func (p *Probe) follow(ctx context.Context) {
	for ctx.Err() == nil {
		index, xid, err := p.lib.WaitXID(500 * time.Millisecond)
		if err != nil {
			p.cfg.Log.Info("the driver reports no XID events", "err", err)
			return
		}
		if xid != 0 {
			p.note(index, xid)
		}
	}
}

// note remembers an XID of a device that is read.
func (p *Probe) note(index, xid int) {
	if !slices.Contains(p.index, index) {
		return
	}
	means, fatal := health.FatalXID(xid)
	p.cfg.Log.Warn("the GPU driver reports an error", "gpu", index, "xid", xid, "fatal", fatal, "means", means)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.xid[index] = xid
	if fatal {
		p.fatal[index] = xid
	}
	// Whoever asks next must not have to wait for the next reading.
	p.devices = slices.Clone(p.devices)
	for i := range p.devices {
		if d := &p.devices[i]; d.Index == index {
			d.XID, d.FatalXID = xid, p.fatal[index]
		}
	}
}

// read looks at every device once.
func (p *Probe) read() {
	found := make([]Device, 0, len(p.index))
	for _, i := range p.index {
		d, err := p.lib.Read(i)
		found = append(found, p.complete(i, d, err))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range found { // an event may have come during the reading
		found[i].XID, found[i].FatalXID = p.xid[found[i].Index], p.fatal[found[i].Index]
	}
	p.devices = found
}

// complete adds what only a series of readings can tell. A device that tells
// nothing this time keeps what it told last, for a busy driver is no fault.
func (p *Probe) complete(i int, d Device, err error) Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if !p.silent[i] {
			p.cfg.Log.Warn("GPU cannot be read", "gpu", i, "err", err)
		}
		p.silent[i] = true
		d.Index = i
		for _, last := range p.devices {
			if last.Index == i {
				lost := d.Lost
				d = last
				d.Lost = last.Lost || lost
			}
		}
		return d
	}
	p.silent[i] = false
	if first, ok := p.baseline[i]; !ok || d.ECCTotal < first { // a reset counts anew
		p.baseline[i] = d.ECCTotal
	}
	d.ECC = d.ECCTotal - p.baseline[i]
	slow := append(p.slow[i], d.Reasons&slowing != 0)
	slow = slow[max(0, len(slow)-window):]
	p.slow[i] = slow
	for _, s := range slow {
		if s {
			d.Throttled += 1 / float64(len(slow))
		}
	}
	d.Throttle = reasons(d.Reasons)
	return d
}

// Devices returns the last reading, in order of the indices. It must not be
// changed.
func (p *Probe) Devices() []Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.devices
}

// Bits of NVML's field of what keeps the clocks down (nvmlClocksEventReasons).
const (
	swPowerCap   = 0x04
	hwSlowdown   = 0x08
	syncBoost    = 0x10
	swThermal    = 0x20
	hwThermal    = 0x40
	hwPowerBrake = 0x80
	// slowing are those that mean trouble. A GPU under full load runs at its power
	// cap, so that one does not.
	slowing = hwSlowdown | swThermal | hwThermal | hwPowerBrake
)

// reasons names the bits that say why a GPU is slower than it could be.
func reasons(bits uint64) (out []string) {
	for _, r := range []struct {
		bit  uint64
		name string
	}{
		{swPowerCap, "sw_power_cap"},
		{hwSlowdown, "hw_slowdown"},
		{syncBoost, "sync_boost"},
		{swThermal, "sw_thermal_slowdown"},
		{hwThermal, "hw_thermal_slowdown"},
		{hwPowerBrake, "hw_power_brake_slowdown"},
	} {
		if bits&r.bit != 0 {
			out = append(out, r.name)
		}
	}
	return out
}
