"""Writes kvcache/kvevents/testdata/batches.txt: batches of KV events as msgspec writes them with vLLM's own
classes. Run it with the Python that scripts/vllm.sh prints, and the file.

    eval "$(sh scripts/vllm.sh)" && "$KVMESH_VLLM" scripts/kvevents-golden.py kvcache/kvevents/testdata/batches.txt
"""

import sys

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def hashed(n):
    return bytes(range(n, n + 32))


# The events as versions before 0.20 had them.
class Old(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class OldStored(Old, tag="BlockStored"):
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_id: object
    medium: object = None


class OldRemoved(Old, tag="BlockRemoved"):
    block_hashes: list
    medium: object = None


class OldCleared(Old, tag="AllBlocksCleared"):
    pass


def stored(**more):
    return BlockStored(
        block_hashes=[hashed(1), hashed(2)], parent_block_hash=None, token_ids=[1, 2, 300, 70000], block_size=2,
        lora_id=None, medium="GPU", lora_name=None, **more,
    )


def batches():
    low = int.from_bytes(hashed(1), "big") & ((1 << 64) - 1)
    yield "map", KVEventBatch(ts=1700000000.25, events=[stored(), BlockRemoved(block_hashes=[hashed(1)], medium="GPU"), AllBlocksCleared()], data_parallel_rank=0)
    yield "map-child", KVEventBatch(
        ts=1.5, data_parallel_rank=3,
        events=[BlockStored(block_hashes=[hashed(3)], parent_block_hash=hashed(2), token_ids=[7, 8], block_size=2, lora_id=1, medium="CPU", lora_name="sql",
                            extra_keys=[("sql", "salt")], group_idx=1, kv_cache_spec_kind="full_attention", locality="LOCAL", session_id="s")],
    )
    yield "map-extra", KVEventBatch(ts=1.5, events=[stored(extra_keys=[("salt",), None])], data_parallel_rank=0)
    yield "map-numbers", KVEventBatch(
        ts=2.0, data_parallel_rank=0,
        events=[BlockStored(block_hashes=[low, 5], parent_block_hash=low, token_ids=[1, 2], block_size=1, lora_id=None, medium="GPU", lora_name=None),
                BlockRemoved(block_hashes=[low], medium="GPU")],
    )
    yield "map-no-rank", KVEventBatch(ts=3.0, events=[])
    yield "array", [4.0, [OldStored([hashed(1), hashed(2)], None, [1, 2, 300, 70000], 2, None, "GPU"), OldRemoved([hashed(1)], "GPU"), OldCleared()], 0]
    yield "array-old", [5.0, [OldStored([low, 5], low, [1, 2], 1, None), OldRemoved([low])]]


with open(sys.argv[1], "w") as f:
    for name, batch in batches():
        f.write("%s %s\n" % (name, msgspec.msgpack.encode(batch).hex()))
