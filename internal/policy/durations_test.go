package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// A duration that its user would misread, or Envoy refuse, is refused at its line.
func TestDurationRanges(t *testing.T) {
	for _, c := range []struct{ kind, path, value, want string }{
		{"WorkerPool", "connect", "off", "WorkerPool x: connect off: want 1ms to 8760h"},
		{"WorkerPool", "connect", "100us", "WorkerPool x: connect 100µs: want 1ms to 8760h"},
		{"WorkerPool", "drain", "8761h", "WorkerPool x: drain 8761h: want 1ms to 8760h, or off"},
		{"WorkerPool", "health.checkInterval", "off", "WorkerPool x: health.checkInterval off: want 1ms"},
		{"WorkerPool", "health.silenceTimeout", "off", "WorkerPool x: health.silenceTimeout off: want 1ms"},
		{"WorkerPool", "health.weightExpirationPeriod", "off", "WorkerPool x: health.weightExpirationPeriod off: want 1ms"},
		{"Mesh", "extProc.messageTimeout", "off", "extProc.messageTimeout off: want 1ms to 1h"},
		{"Mesh", "extProc.messageTimeout", "999us", "extProc.messageTimeout 999µs: want 1ms to 1h"},
		{"Mesh", "extProc.messageTimeout", "1h1s", "extProc.messageTimeout 1h0m1s: want 1ms to 1h"},
		{"Mesh", "bodyTimeout", "1ns", "bodyTimeout 1ns: want 1ms to 8760h, or off"},
		{"ModelRoute", "timeouts.streamIdle", "100us", "ModelRoute x: timeouts.streamIdle 100µs: want 1ms"},
		{"ModelRoute", "stream.stallMin", "off", "ModelRoute x: stream.stallMin off: want 1ms to 8760h"},
		{"ModelRoute", "stream.wait", "2562047h", "ModelRoute x: stream.wait 2562047h: want 1ms"},

		{"WorkerPool", "drain", "off", ""},
		{"WorkerPool", "sim.itl", "1ns", ""},
		{"WorkerPool", "health.blackoutPeriod", "off", ""},
		{"Mesh", "extProc.messageTimeout", "1h", ""},
		{"Mesh", "extProc.messageTimeout", "1ms", ""},
		{"Mesh", "shareWait", "off", ""},
		{"ModelRoute", "timeouts.firstByte", "off", ""},
		{"ModelRoute", "timeouts.request", "8760h", ""},
	} {
		t.Run(c.path+" "+c.value, func(t *testing.T) {
			text := head + c.kind + "\nmetadata: {name: x}\nspec:\n" // the value stands at line 5, or 6
			switch c.kind {
			case "WorkerPool":
				text = strings.Replace(text, "spec:\n", "spec: {engine: sim, model: m,\n", 1)
			case "ModelRoute":
				text = strings.Replace(text, "spec:\n", "spec: {models: [m], tiers: [{pool: main}],\n", 1)
			default:
				text = strings.Replace(text, "spec:\n", "spec: {\n", 1)
			}
			for name := range strings.SplitSeq(c.path, ".") {
				text += "  " + name + ": {\n"
			}
			text = strings.TrimSuffix(text, "{\n") + c.value + strings.Repeat(" }", strings.Count(c.path, ".")+1) + "\n---\n" + pool
			_, err := Parse(File{Name: "p.yaml", Data: []byte(text)})
			if c.want == "" {
				if err != nil {
					t.Errorf("error = %v, want none", err)
				}
				return
			}
			if want := fmt.Sprintf("p.yaml:%d: %s", 5+strings.Count(c.path, "."), c.want); err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("error = %v\nwant      %s", err, want)
			}
		})
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{10 * time.Second: "10s", time.Minute: "1m", 10 * time.Minute: "10m", 20 * time.Hour: "20h", time.Hour + time.Second: "1h0m1s"} {
		if got := short(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// Numbers that no worker or Envoy would take are refused, and the last ones that they
// take are not.
func TestNumberRanges(t *testing.T) {
	mesh := func(spec string) string { return pool + "---\n" + head + "Mesh\nspec:\n" + spec }
	for _, c := range []struct{ text, want string }{
		{pool + "  worker: {contextLength: 7}\n", "8: WorkerPool main: worker.contextLength 7: want at least 8"},
		{pool + "  worker: {contextLength: 9223372036854775807}\n", "8: WorkerPool main: worker.contextLength 9223372036854775807: want at most 1073741824"},
		{pool + "  worker: {maxNumSeqs: 1000000000}\n", "8: WorkerPool main: worker.maxNumSeqs 1000000000: want at most 1048576"},
		{strings.Replace(pool, "sim\n", "llamacpp\n", 1) + "  worker: {maxNumSeqs: 257}\n", "8: WorkerPool main: worker.maxNumSeqs 257: want at most 256"},
		{pool + "  worker: {maxQueue: 1073741825}\n", "8: WorkerPool main: worker.maxQueue 1073741825: want at most 1073741824"},
		{pool + "  worker: {threads: 513}\n", "8: WorkerPool main: worker.threads 513: want at most 512"},
		{pool + "  health: {hysteresis: .nan}\n", "8: WorkerPool main: health.hysteresis NaN: want 0 to 1"},
		{pool + "  health: {minShare: .inf}\n", "8: WorkerPool main: health.minShare +Inf: want 0 to 1"},
		{pool + "  health: {errorUtilizationPenalty: -.inf}\n", "8: WorkerPool main: health.errorUtilizationPenalty -Inf: want 0 to 100"},
		{pool + "  health: {throttleUtilizationPenalty: .nan}\n", "8: WorkerPool main: health.throttleUtilizationPenalty NaN: want 0 to 100"},
		{mesh("  envoy: {maxHeap: 1}\n"), "12: envoy.maxHeap 1: want at least 128Mi"},
		{mesh("  maxBody: 1Mi\n  envoy: {maxHeap: 65Mi}\n"), "13: envoy.maxHeap 65Mi: want at least 66Mi"},

		{pool + "  worker: {contextLength: 8, maxNumSeqs: 1048576, maxQueue: 1073741824, threads: 512}\n", ""},
		{pool + "  worker: {contextLength: 1073741824, maxNumSeqs: 1, maxQueue: 1}\n", ""},
		{pool + "  health: {hysteresis: 0, minShare: 1, errorUtilizationPenalty: 100}\n", ""},
		{mesh("  maxBody: 1Mi\n  envoy: {maxHeap: 66Mi}\n"), ""},
	} {
		_, err := Parse(File{Name: "p.yaml", Data: []byte(c.text)})
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v, want none", c.text, err)
		case c.want != "" && (err == nil || !strings.HasPrefix(err.Error(), "p.yaml:"+c.want)):
			t.Errorf("error = %v\nwant      p.yaml:%s", err, c.want)
		}
	}
}
