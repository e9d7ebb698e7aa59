package health

import (
	"fmt"
	"math"
)

// GPU is what the worst of a worker's GPUs tells. The zero value is a GPU without
// any trouble, and a worker without GPU.
type GPU struct {
	Lost        bool    // it is gone from the bus, or needs a reset
	XID         int     // the last fatal XID since the worker started, 0 for none
	ECC         float64 // uncorrectable memory errors since the worker started
	RemapFailed bool    // broken memory could not be replaced
	Throttled   float64 // 0..1, share of the last seconds slowed by heat or lack of power
}

// Fault says why the GPU must not be used, "" when it may be.
func (g GPU) Fault() string {
	switch {
	case g.Lost:
		return "GPU: lost, or in need of a reset"
	case g.XID != 0:
		if means, fatal := FatalXID(g.XID); fatal {
			return fmt.Sprintf("GPU: XID %d, %s", g.XID, means)
		}
		return fmt.Sprintf("GPU: XID %d", g.XID)
	case g.ECC > 0:
		return "GPU: uncorrectable memory error"
	case g.RemapFailed:
		return "GPU: broken memory could not be replaced"
	}
	return ""
}

// Worse returns the worst of both in each respect.
func (g GPU) Worse(o GPU) GPU {
	if g.XID == 0 {
		g.XID = o.XID
	}
	return GPU{
		Lost: g.Lost || o.Lost, XID: g.XID, ECC: math.Max(g.ECC, o.ECC),
		RemapFailed: g.RemapFailed || o.RemapFailed, Throttled: math.Max(g.Throttled, o.Throttled),
	}
}

// slowed is how much more a unit of work weighs on a GPU that is slowed down.
func (g GPU) slowed(penalty float64) float64 {
	if !(g.Throttled > 0) { // no number is no trouble
		return 1
	}
	return 1 + penalty*math.Min(g.Throttled, 1)
}

// FatalXID tells whether the driver's error number says that the GPU cannot go on
// without a reset, a reboot or a repair, and what it means.
//
// The list follows the catalog in NVIDIA's document "XID Errors": those whose
// immediate action is to reset the GPU, restart the machine or call support. Left
// out are the errors of a program (13, 31, 32, 43, 45, 68, 69, 109), after which
// the GPU works on and the self-check tells whether the engine does; NVIDIA's
// Kubernetes device plugin ignores those too. Left out as well are reports without
// need for action (63: a row was remapped; 92: many corrected errors; 154: which
// recovery is due, whose cause is a number of its own).
func FatalXID(xid int) (means string, fatal bool) {
	switch xid {
	case 46:
		return "the GPU stopped processing", true
	case 48:
		return "double-bit memory error", true
	case 54:
		return "auxiliary power is not connected", true
	case 61, 62:
		return "the internal micro-controller stopped", true
	case 64:
		return "broken memory could not be replaced", true
	case 74:
		return "NVLink error", true
	case 79:
		return "the GPU has fallen off the bus", true
	case 94, 95:
		// 94 is contained: other processes may go on, but a worker is the very
		// process that used the memory.
		return "memory error beyond correction", true
	case 110:
		return "security fault", true
	case 119, 120:
		return "the GPU's system processor does not answer", true
	case 136:
		return "link training failed", true
	case 140:
		return "memory error without recovery", true
	case 143:
		return "the GPU could not be initialized", true
	}
	return "", false
}
