package e2e

import (
	"syscall"
	"testing"
)

// TestLateWrites stops a worker, moves its stream and lets it go on: what it then
// writes is refused and counted, and the stream can move once more.
func TestLateWrites(t *testing.T) {
	dir := kvDir(t)
	kv := []string{"--kv-dir", dir, "--kv-limit", "2147483648", "--checkpoint-interval", "1"}
	one, two := startProcess(t, "one", kv...), startProcess(t, "two", kv...)
	q := questions(t, two, 1)[0]
	delivered, s := cut(t, one, q.body, map[string]any{"token_ids": true, "salt": "s"}, "moves", cutting{at: 20})
	got := goOn(t, two, q.body, delivered, "moves", "s")
	if why := differs(got, q.want); why != "" || got.mode != "exact" || got.computed != 1 {
		t.Errorf("moved: %s; %s, computed %d", why, got.mode, got.computed)
	}
	one.signal(syscall.SIGCONT)
	late := delivered
	late.rest(t, s) // it goes on as if nothing had happened
	one.idle()
	if n := one.metric("kvmesh_kv_stale_total"); n == 0 {
		t.Error("late writes were not refused")
	}
	if n := two.metric("kvmesh_kv_stale_total"); n != 0 {
		t.Errorf("%v writes of the successor were refused", n)
	}
	again := run{}
	again.ids = append(again.ids, got.ids[:50]...)
	again.text = two.text(again.ids)
	moved := goOn(t, two, q.body, again, "moves", "s")
	if why := differs(moved, q.want); why != "" || moved.mode != "exact" {
		t.Errorf("moved again: %s; %s, computed %d", why, moved.mode, moved.computed)
	}
}
