"""Writes kvcache/lmcache/testdata/calls.txt: calls and answers as LMCache's own codec puts them on the wire.

Run it with a Python that has LMCache, as `make e2e-lmcache` installs it: PYTHONPATH=SITE PYTHON scripts/lmcache-golden.py FILE."""
import sys

from lmcache.v1.multiprocess.custom_types import (
    BlockAllocationRecord, IPCCacheServerKey, PrepareRetrieveResponse, PrepareStoreResponse, RegisterEngineDrivenContextPayload,
    RegisterEngineDrivenContextResponse)
from lmcache.v1.multiprocess.transport.grpc_impl.method_registry import get_method_codec_registry

key = IPCCacheServerKey(model_name="/models/tiny", world_size=2, worker_id=1, token_ids=tuple(range(1, 13)), start=4, end=12, request_id="cmpl-7",
                        cache_salt="tenant", request_configs={"lmcache.tag.lora": "a"}, num_kv_readers=1)
slots = [{"offset": 4352, "length": 512, "shape": [2, 2, 4, 8], "dtype": "float32"}, {"offset": 1 << 33, "length": 512, "shape": [2, 2, 4, 8], "dtype": "float32"}]
calls = {
    "ControllerService.GetChunkSize": ((), 256),
    "ControllerService.GetExperimental": ((), []),
    "ControllerService.Ping": ((2**62 + 3,), True),
    "ControllerService.Clear": ((False,), None),
    "EngineDrivenService.RegisterKvCacheEngineDrivenContext": ((RegisterEngineDrivenContextPayload(
        instance_id=2**62 + 3, model_name="/models/tiny", world_size=2, block_size=2, num_layers=2, hidden_dim_size=8, dtype_str="float32", use_mla=False,
        num_physical_slots=4),), RegisterEngineDrivenContextResponse(shm_name="kvmesh-lmcache-0123456789abcdef", pool_size=1 << 32)),
    "EngineDrivenService.UnregisterKvCacheEngineDrivenContext": ((2**62 + 3,), None),
    "EngineDrivenService.PrepareStore": ((key, 2**62 + 3), PrepareStoreResponse(context={"slots": slots, "chunk_indices": [0, 1]})),
    "EngineDrivenService.CommitStore": ((key, 2**62 + 3, b""), True),
    "EngineDrivenService.PrepareRetrieve": ((key, 2**62 + 3), PrepareRetrieveResponse(success=True, data=b"", context={"slots": slots})),
    "EngineDrivenService.CommitRetrieve": ((key, 2**62 + 3), True),
    "LookupService.Lookup": ((key.no_worker_id_version(), 2), None),
    "LookupService.QueryPrefetchStatus": (("cmpl-7",), None),
    "LookupService.WaitPrefetchStatus": (("cmpl-7", 1.5), 3),
    "LookupService.FreeLookupLocks": ((key.no_worker_id_version(), 2), None),
    "LookupService.EndSession": (("cmpl-7",), None),
    "ObservabilityService.ReportBlockAllocation": ((7, "/models/tiny", [BlockAllocationRecord(req_id="cmpl-7", new_block_ids=[1], new_token_ids=[2, 3])]), None),
}
codecs = get_method_codec_registry().by_full_name
lines = []
for name, (args, answer) in calls.items():
    codec = codecs["lmcache.mp." + name]
    request = codec.request_encoder(args, {}).SerializeToString(deterministic=True)
    response = codec.response_encoder(answer).SerializeToString(deterministic=True)
    lines.append(f"{name} {request.hex() or '-'} {response.hex() or '-'}\n")
with open(sys.argv[1], "w") as f:
    f.writelines(lines)
