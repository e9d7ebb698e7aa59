//go:build unix

package lmcache

import (
	"encoding/hex"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// call is a call with its answer.
type call struct{ request, answer proto.Message }

// goldenCalls are what testdata/calls.txt has, which LMCache's own codec has written
// (scripts/lmcache-golden.py).
func goldenCalls() map[string]call {
	const id = 1<<62 + 3
	rank, slots, three := int64(1), int64(4), int64(3)
	key := func(rank *int64) *lmcachepb.IpcCacheServerKey {
		return &lmcachepb.IpcCacheServerKey{
			ModelName: "/models/tiny", WorldSize: 2, WorkerId: rank, TokenIds: []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, Start: 4, End: 12,
			RequestId: "cmpl-7", CacheSalt: "tenant", EncodedRequestConfigs: []byte("\x81\xb0lmcache.tag.lora\xa1a"), NumKvReaders: 1,
		}
	}
	room := []slot{{4352, 512, []int{2, 2, 4, 8}, "float32"}, {1 << 33, 512, []int{2, 2, 4, 8}, "float32"}}
	return map[string]call{
		"ControllerService.GetChunkSize":    {&lmcachepb.GetChunkSizeRequest{}, &lmcachepb.GetChunkSizeResponse{ChunkSize: 256}},
		"ControllerService.GetExperimental": {&lmcachepb.GetExperimentalRequest{}, &lmcachepb.GetExperimentalResponse{}},
		"ControllerService.Ping":            {&lmcachepb.PingRequest{InstanceId: new(int64(id))}, &lmcachepb.PingResponse{Ok: true}},
		"ControllerService.Clear":           {&lmcachepb.ClearRequest{Force: new(bool)}, &lmcachepb.ClearResponse{}},
		"EngineDrivenService.RegisterKvCacheEngineDrivenContext": {
			&lmcachepb.RegisterKvCacheEngineDrivenContextRequest{
				InstanceId: id, ModelName: "/models/tiny", WorldSize: 2, BlockSize: 2, NumLayers: 2, HiddenDimSize: 8, DtypeStr: "float32", NumPhysicalSlots: &slots,
			},
			&lmcachepb.RegisterKvCacheEngineDrivenContextResponse{ShmName: "kvmesh-lmcache-0123456789abcdef", PoolSize: 1 << 32},
		},
		"EngineDrivenService.UnregisterKvCacheEngineDrivenContext": {
			&lmcachepb.UnregisterKvCacheEngineDrivenContextRequest{InstanceId: id}, &lmcachepb.UnregisterKvCacheEngineDrivenContextResponse{},
		},
		"EngineDrivenService.PrepareStore": {
			&lmcachepb.PrepareStoreRequest{Key: key(&rank), InstanceId: id}, &lmcachepb.PrepareStoreResponse{EncodedContext: storeContext(room, []int{0, 1})},
		},
		"EngineDrivenService.CommitStore": {&lmcachepb.CommitStoreRequest{Key: key(&rank), InstanceId: id}, &lmcachepb.CommitStoreResponse{Success: true}},
		"EngineDrivenService.PrepareRetrieve": {
			&lmcachepb.PrepareRetrieveRequest{Key: key(&rank), InstanceId: id}, &lmcachepb.PrepareRetrieveResponse{Success: true, EncodedContext: retrieveContext(room)},
		},
		"EngineDrivenService.CommitRetrieve": {&lmcachepb.CommitRetrieveRequest{Key: key(&rank), InstanceId: id}, &lmcachepb.CommitRetrieveResponse{Success: true}},
		"LookupService.Lookup":               {&lmcachepb.LookupRequest{Key: key(nil), TpSize: 2}, &lmcachepb.LookupResponse{}},
		"LookupService.QueryPrefetchStatus":  {&lmcachepb.QueryPrefetchStatusRequest{RequestId: "cmpl-7"}, &lmcachepb.QueryPrefetchStatusResponse{}},
		"LookupService.WaitPrefetchStatus": {
			&lmcachepb.WaitPrefetchStatusRequest{RequestId: "cmpl-7", Timeout: 1.5}, &lmcachepb.WaitPrefetchStatusResponse{ChunkCount: &three},
		},
		"LookupService.FreeLookupLocks": {&lmcachepb.FreeLookupLocksRequest{Key: key(nil), TpSize: 2}, &lmcachepb.FreeLookupLocksResponse{}},
		"LookupService.EndSession":      {&lmcachepb.EndSessionRequest{RequestId: "cmpl-7"}, &lmcachepb.EndSessionResponse{}},
		"ObservabilityService.ReportBlockAllocation": {
			&lmcachepb.ReportBlockAllocationRequest{
				InstanceId: 7, ModelName: "/models/tiny",
				Records: []*lmcachepb.BlockAllocationRecord{{ReqId: "cmpl-7", NewBlockIds: []int64{1}, NewTokenIds: []int64{2, 3}}},
			},
			&lmcachepb.ReportBlockAllocationResponse{},
		},
	}
}

// TestGolden: every call and answer is, byte by byte, what LMCache has on the wire, and is
// read as what it means.
func TestGolden(t *testing.T) {
	text, err := os.ReadFile("testdata/calls.txt")
	if err != nil {
		t.Fatal(err)
	}
	calls := goldenCalls()
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		want, ok := calls[f[0]]
		if !ok || len(f) != 3 {
			t.Fatalf("line %q", line)
		}
		delete(calls, f[0])
		for i, m := range []proto.Message{want.request, want.answer} {
			golden, err := hex.DecodeString(strings.TrimPrefix(f[1+i], "-"))
			if err != nil {
				t.Fatal(err)
			}
			got := m.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(golden, got); err != nil {
				t.Fatalf("%s: %v", f[0], err)
			}
			if diff := cmp.Diff(m, got, protocmp.Transform()); diff != "" {
				t.Errorf("%s is read as something else:\n%s", f[0], diff)
			}
			ours, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
			if err != nil || !slices.Equal(ours, golden) {
				t.Errorf("%s is written as\n%x, want\n%x (%v)", f[0], ours, golden, err)
			}
		}
	}
	for name := range calls {
		t.Errorf("no line for %s", name)
	}
}
