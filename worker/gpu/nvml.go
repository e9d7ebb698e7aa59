//go:build linux && (amd64 || arm64)

package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/ebitengine/purego"
)

// nvml is the management library. Its functions may be called from any goroutine.
// They are those of nvml.h, whose names stand beside them; handles are pointers of
// the library's own.
type nvml struct {
	handle uintptr

	initialize  func() int32                                                      // nvmlInit_v2
	shutdown    func() int32                                                      // nvmlShutdown
	text        func(code int32) string                                           // nvmlErrorString
	count       func(n *uint32) int32                                             // nvmlDeviceGetCount_v2
	byIndex     func(i uint32, device *uintptr) int32                             // nvmlDeviceGetHandleByIndex_v2
	uuid        func(device uintptr, text *byte, size uint32) int32               // nvmlDeviceGetUUID
	name        func(device uintptr, text *byte, size uint32) int32               // nvmlDeviceGetName
	memory      func(device uintptr, m *memoryInfo) int32                         // nvmlDeviceGetMemoryInfo
	utilization func(device uintptr, u *utilizationInfo) int32                    // nvmlDeviceGetUtilizationRates
	temperature func(device uintptr, sensor uint32, celsius *uint32) int32        // nvmlDeviceGetTemperature
	power       func(device uintptr, milliwatts *uint32) int32                    // nvmlDeviceGetPowerUsage
	reasons     func(device uintptr, bits *uint64) int32                          // nvmlDeviceGetCurrentClocksEventReasons
	ecc         func(device uintptr, kind, counter uint32, n *uint64) int32       // nvmlDeviceGetTotalEccErrors
	remapped    func(device uintptr, corr, uncorr, pending, failed *uint32) int32 // nvmlDeviceGetRemappedRows
	newEvents   func(set *uintptr) int32                                          // nvmlEventSetCreate
	register    func(device uintptr, types uint64, set uintptr) int32             // nvmlDeviceRegisterEvents
	wait        func(set uintptr, e *eventInfo, milliseconds uint32) int32        // nvmlEventSetWait_v2
	freeEvents  func(set uintptr) int32                                           // nvmlEventSetFree

	devices []uintptr // handles by index, 0 for a device that had none at the start
	events  uintptr   // event set, 0 for none
}

// Structures of nvml.h; field order and sizes are those of C on 64-bit machines. What
// nobody asks for has no name.
type (
	memoryInfo      struct{ total, _, used uint64 } // nvmlMemory_t
	utilizationInfo struct{ gpu, _ uint32 }         // nvmlUtilization_t, percent
	eventInfo       struct {                        // nvmlEventData_t
		device     uintptr
		kind, data uint64
		_, _       uint32 // MIG instances
	}
)

// Codes and constants of nvml.h.
const (
	notSupported  = 3  // NVML_ERROR_NOT_SUPPORTED
	timedOut      = 10 // NVML_ERROR_TIMEOUT
	gpuIsLost     = 15 // NVML_ERROR_GPU_IS_LOST
	resetRequired = 16 // NVML_ERROR_RESET_REQUIRED

	uncorrected = 1    // NVML_MEMORY_ERROR_TYPE_UNCORRECTED
	volatileECC = 0    // NVML_VOLATILE_ECC: since the driver was loaded
	eventXID    = 0x08 // nvmlEventTypeXidCriticalError
	uuidSize    = 80   // NVML_DEVICE_UUID_BUFFER_SIZE
	nameSize    = 96   // NVML_DEVICE_NAME_V2_BUFFER_SIZE
	defaultPath = "libnvidia-ml.so.1"
)

// load opens the library and starts it.
func load(path string) (library, error) {
	if path == "" {
		path = defaultPath
	}
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrAbsent, err)
	}
	n := &nvml{handle: handle}
	if err := errors.Join(n.bind(), n.start()); err != nil {
		return nil, errors.Join(err, purego.Dlclose(handle))
	}
	return n, nil
}

// bind looks up the functions. Those of old drivers have another name or are
// missing, and what they tell is then unknown.
func (n *nvml) bind() error {
	for _, f := range []struct {
		to       any
		optional bool
		names    []string
	}{
		{&n.initialize, false, []string{"nvmlInit_v2"}},
		{&n.shutdown, false, []string{"nvmlShutdown"}},
		{&n.text, false, []string{"nvmlErrorString"}},
		{&n.count, false, []string{"nvmlDeviceGetCount_v2"}},
		{&n.byIndex, false, []string{"nvmlDeviceGetHandleByIndex_v2"}},
		{&n.uuid, false, []string{"nvmlDeviceGetUUID"}},
		{&n.name, false, []string{"nvmlDeviceGetName"}},
		{&n.memory, false, []string{"nvmlDeviceGetMemoryInfo"}},
		{&n.utilization, false, []string{"nvmlDeviceGetUtilizationRates"}},
		{&n.temperature, true, []string{"nvmlDeviceGetTemperature"}},
		{&n.power, true, []string{"nvmlDeviceGetPowerUsage"}},
		{&n.reasons, true, []string{"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"}},
		{&n.ecc, true, []string{"nvmlDeviceGetTotalEccErrors"}},
		{&n.remapped, true, []string{"nvmlDeviceGetRemappedRows"}},
		{&n.newEvents, true, []string{"nvmlEventSetCreate"}},
		{&n.register, true, []string{"nvmlDeviceRegisterEvents"}},
		{&n.wait, true, []string{"nvmlEventSetWait_v2"}},
		{&n.freeEvents, true, []string{"nvmlEventSetFree"}},
	} {
		symbol, err := lookUp(n.handle, f.names)
		switch {
		case err == nil:
			purego.RegisterFunc(f.to, symbol)
		case !f.optional:
			return fmt.Errorf("NVML: %w", err)
		}
	}
	return nil
}

// lookUp finds the first of several names.
func lookUp(handle uintptr, names []string) (symbol uintptr, err error) {
	for _, name := range names {
		if symbol, err = purego.Dlsym(handle, name); err == nil {
			return symbol, nil
		}
	}
	return 0, err
}

// start initializes the library, and finds the devices and their events.
func (n *nvml) start() error {
	if n.initialize == nil { // bind failed and says so
		return nil
	}
	if err := n.check(n.initialize()); err != nil {
		return fmt.Errorf("%w: start NVML: %w", ErrAbsent, err)
	}
	var count uint32
	if err := n.check(n.count(&count)); err != nil {
		return errors.Join(fmt.Errorf("count GPUs: %w", err), n.check(n.shutdown()))
	}
	for i := range count {
		var d uintptr
		// A device that is lost already has no handle; reading it will say so.
		_ = n.byIndex(i, &d)
		n.devices = append(n.devices, d)
	}
	n.subscribe()
	return nil
}

// subscribe asks for XID events of all devices. Not every device has them, and a
// virtual machine may forbid them.
func (n *nvml) subscribe() {
	if n.newEvents == nil || n.register == nil || n.wait == nil || n.freeEvents == nil {
		return
	}
	if n.newEvents(&n.events) != 0 {
		n.events = 0
		return
	}
	registered := 0
	for _, d := range n.devices {
		if d != 0 && n.register(d, eventXID, n.events) == 0 {
			registered++
		}
	}
	if registered == 0 {
		n.freeEvents(n.events)
		n.events = 0
	}
}

// check turns a code into an error.
func (n *nvml) check(code int32) error {
	if code == 0 {
		return nil
	}
	return nvmlError{code, n.text(code)}
}

// nvmlError is a code other than success.
type nvmlError struct {
	code int32
	text string
}

// Error gives NVML's own words.
func (e nvmlError) Error() string { return fmt.Sprintf("%s (NVML error %d)", e.text, e.code) }

// Count implements library.
func (n *nvml) Count() (int, error) { return len(n.devices), nil }

// Read implements library. Only what every device tells must be there.
func (n *nvml) Read(index int) (Device, error) {
	d := Device{Index: index}
	h := n.devices[index]
	if h == 0 {
		if err := n.check(n.byIndex(uint32(index), &h)); err != nil {
			return n.lost(d, err)
		}
	}
	var text [nameSize]byte
	if err := n.check(n.uuid(h, &text[0], uuidSize)); err != nil {
		return n.lost(d, err)
	}
	d.UUID = cString(text[:])
	if n.name(h, &text[0], nameSize) == 0 {
		d.Name = cString(text[:])
	}
	var m memoryInfo
	if err := n.check(n.memory(h, &m)); err != nil {
		return n.lost(d, err)
	}
	d.MemoryTotalMB, d.MemoryUsedMB = m.total>>20, m.used>>20
	n.readRest(h, &d)
	return d, nil
}

// readRest fills in what a device may not tell.
func (n *nvml) readRest(h uintptr, d *Device) {
	var u utilizationInfo
	if n.utilization(h, &u) == 0 {
		d.Utilization = float64(u.gpu) / 100
	}
	var x uint32
	if n.temperature != nil && n.temperature(h, 0, &x) == 0 {
		d.TemperatureC = float64(x)
	}
	if n.power != nil && n.power(h, &x) == 0 {
		d.PowerW = float64(x) / 1000
	}
	var bits uint64
	if n.reasons != nil && n.reasons(h, &bits) == 0 {
		d.Reasons = bits
	}
	var errs uint64
	if n.ecc != nil && n.ecc(h, uncorrected, volatileECC, &errs) == 0 {
		d.ECCTotal = errs
	}
	var corr, uncorr, pending, failed uint32
	if n.remapped != nil && n.remapped(h, &corr, &uncorr, &pending, &failed) == 0 {
		d.RemapPending, d.RemapFailed = pending != 0, failed != 0
	}
}

// lost marks a device whose error says that it cannot come back by itself.
func (n *nvml) lost(d Device, err error) (Device, error) {
	if e, ok := errors.AsType[nvmlError](err); ok && (e.code == gpuIsLost || e.code == resetRequired) {
		d.Lost = true
	}
	return d, err
}

// WaitXID implements library.
func (n *nvml) WaitXID(timeout time.Duration) (index, xid int, err error) {
	if n.events == 0 {
		return 0, 0, nvmlError{notSupported, "no events"}
	}
	var e eventInfo
	switch code := n.wait(n.events, &e, uint32(timeout.Milliseconds())); code {
	case 0:
	case timedOut:
		return 0, 0, nil
	default:
		return 0, 0, n.check(code)
	}
	for i, h := range n.devices {
		if h == e.device && e.kind&eventXID != 0 {
			return i, int(e.data), nil
		}
	}
	return 0, 0, nil
}

// Close implements library.
func (n *nvml) Close() error {
	if n.events != 0 {
		n.freeEvents(n.events)
		n.events = 0
	}
	return errors.Join(n.check(n.shutdown()), purego.Dlclose(n.handle))
}

// cString is the text up to the first zero byte.
func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
