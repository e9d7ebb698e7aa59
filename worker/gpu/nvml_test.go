//go:build linux && (amd64 || arm64)

package gpu

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ebitengine/purego"
	"github.com/google/go-cmp/cmp"
)

// Numbers of fake_set, as testdata/nvml.c has them.
const (
	setReturn = iota
	setReasons
	setECC
	setFailed
	setPending
)

// fakeNVML builds the stand-in library and returns its path and its controls.
func fakeNVML(t *testing.T) (path string, set func(what uint32, to uint64), xid func(uint64)) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler to build the stand-in library with")
	}
	path = filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	if out, err := exec.Command(cc, "-shared", "-fPIC", "-O1", "-o", path, "testdata/nvml.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	purego.RegisterLibFunc(&set, handle, "fake_set")
	purego.RegisterLibFunc(&xid, handle, "fake_xid")
	return path, set, xid
}

// Every value arrives from C in its place.
func TestNVML(t *testing.T) {
	path, set, xid := fakeNVML(t)
	set(setECC, 3) // from before this worker
	p, err := Open(Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	want := []Device{
		{
			Index: 0, UUID: "GPU-aaaa", Name: "Fake H200", MemoryUsedMB: 1024, MemoryTotalMB: 141 << 10,
			Utilization: 0.75, TemperatureC: 61, PowerW: 345.6, ECCTotal: 3,
		},
		{
			Index: 1, UUID: "GPU-bbbb", Name: "Fake H200", MemoryUsedMB: 2048, MemoryTotalMB: 141 << 10,
			Utilization: 0.75, TemperatureC: 61, PowerW: 345.6,
		},
	}
	if diff := cmp.Diff(want, p.Devices()); diff != "" {
		t.Error(diff)
	}
	set(setReasons, hwThermal|swPowerCap)
	set(setECC, 5)
	set(setFailed, 1)
	set(setPending, 1)
	p.read()
	want[0].Reasons, want[0].Throttle, want[0].Throttled = hwThermal|swPowerCap, []string{"sw_power_cap", "hw_thermal_slowdown"}, 0.5
	want[0].ECCTotal, want[0].ECC, want[0].RemapFailed, want[0].RemapPending = 5, 2, true, true
	if diff := cmp.Diff(want, p.Devices()); diff != "" {
		t.Error(diff)
	}
	set(setReturn, gpuIsLost)
	p.read()
	want[0].Lost = true
	if diff := cmp.Diff(want, p.Devices()); diff != "" {
		t.Errorf("a lost GPU: %s", diff)
	}
	set(setReturn, 0)
	p.read()
	if d := p.Devices()[0]; d.Lost {
		t.Error("a GPU that answers again is still lost")
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	xid(79)
	for p.Devices()[1].FatalXID != 79 {
		select {
		case <-done:
			t.Fatal("Run ended")
		default:
		}
	}
	if d := p.Devices()[0]; d.XID != 0 {
		t.Errorf("the other GPU has XID %d", d.XID)
	}
	cancel()
	<-done
}

func TestSelect(t *testing.T) {
	path, _, _ := fakeNVML(t)
	for _, c := range []struct {
		want  []string
		found []int // nil for an error
	}{
		{nil, []int{0, 1}},
		{[]string{"1"}, []int{1}},
		{[]string{"GPU-b"}, []int{1}},
		{[]string{"1", "GPU-aaaa", "GPU-bbbb"}, []int{0, 1}},
		{[]string{"GPU-"}, nil},
		{[]string{""}, nil},
		{[]string{"2"}, nil},
		{[]string{"-1"}, nil},
		{[]string{"GPU-c"}, nil},
	} {
		p, err := Open(Config{Path: path, Devices: c.want})
		if err != nil {
			if c.found != nil {
				t.Errorf("%q: %v", c.want, err)
			}
			continue
		}
		if !slices.Equal(p.index, c.found) {
			t.Errorf("%q: %v, want %v", c.want, p.index, c.found)
		}
		if err := p.lib.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestNoLibrary(t *testing.T) {
	if _, err := Open(Config{Path: filepath.Join(t.TempDir(), "none.so")}); !errors.Is(err, ErrAbsent) {
		t.Error(err)
	}
	// Some other library is no NVML either.
	if _, err := load("libc.so.6"); err == nil {
		t.Error("libc was taken for NVML")
	}
}
