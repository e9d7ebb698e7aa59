"""Drives a KV node with LMCache's own client classes: lmcache_client.py URL.

What it wants done (kill node, start node, kill server, start server, forget) it says on a line of stdout, and waits for an
answer on stdin. Every other line says what was shown."""
import sys
import time

import torch
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp, ParallelStrategy
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

url = sys.argv[1]
CHUNK, BLOCK, BLOCKS, LAYERS, HEADS, SIZE = 32, 16, 64, 3, 2, 8


def want(what):
    """Has the test do something."""
    print(what, flush=True)
    assert sys.stdin.readline(), "the test is gone"


def caches(seed):
    """The KV of an engine, as vLLM has it on a CPU; 0 has nothing in it."""
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(2, BLOCKS, HEADS, BLOCK, SIZE, generator=g).to(torch.bfloat16) * bool(seed) for i in range(LAYERS)}


def strategy(world=1, rank=0):
    return ParallelStrategy(mla_only=False, vllm_world_size=world, vllm_worker_id=rank, tp_size=world, pp_size=1, n_servers=1)


CONFIG = {"lmcache.mp.mq_timeout": 60, "lmcache.mp.heartbeat_interval": 2, "lmcache.mp.mp_transfer_mode": "engine_driven"}


class Engine:
    """A scheduler and a worker, as LMCache's connector makes them."""

    def __init__(self, seed, model="tiny", world=1, rank=0):
        self.kv = caches(seed)
        self.worker = LMCacheMPWorkerAdapter(url, None, model, BLOCK, strategy(world, rank), extra_config=CONFIG)
        self.scheduler = LMCacheMPSchedulerAdapter([url], None, model, BLOCK, strategy(world, rank), extra_config=CONFIG)
        self.worker.register_kv_caches(self.kv)
        assert isinstance(self.worker.transfer_ctx.engine_driven_context, EngineDrivenContextShm), "the pool cannot be opened"

    def op(self, ids, blocks, start, end):
        return LoadStoreOp(token_ids=ids, block_ids=[blocks[start // BLOCK:end // BLOCK]], start=start, end=end)

    def store(self, request, ids, blocks, start, end, salt=""):
        self.worker.submit_store_request(request, self.op(ids, blocks, start, end), None, cache_salt=salt)
        future = self.worker.store_futures.pop(request, None)
        return future is not None and future.result(timeout=60)

    def lookup(self, request, ids, salt=""):
        self.scheduler.maybe_submit_lookup_request(request, ids, cache_salt=salt)
        deadline = time.monotonic() + 60
        while (n := self.scheduler.check_lookup_result(request)) is None:
            assert time.monotonic() < deadline, "a look-up never ends"
            time.sleep(0.005)
        self.scheduler.cleanup_lookup_result(request)
        return n

    def retrieve(self, request, ids, blocks, start, end, salt=""):
        self.worker.submit_retrieve_request(request, self.op(ids, blocks, start, end), None, cache_salt=salt)
        future = self.worker.retrieve_futures.pop(request, None)
        ok = future is not None and future[0].result(timeout=60)
        self.scheduler.end_session(request)
        return ok

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def equal(a, ablocks, b, bblocks, tokens):
    """Whether two engines have the same KV of so many tokens, bit for bit."""
    n = tokens // BLOCK
    return all(torch.equal(a.kv[k][:, ablocks[:n]], b.kv[k][:, bblocks[:n]]) for k in a.kv)


def until(what, ok, patience=60):
    deadline = time.monotonic() + patience
    while not ok():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.05)


ids = list(range(1, 1 + 5 * CHUNK + 3))
first, second = list(range(3, 3 + 10)), list(range(40, 40 + 10))

a = Engine(1)
assert a.lookup("r0", ids) == 0, "something is found of nothing"
begin = time.monotonic()
assert a.store("r0", ids, first, 0, 3 * CHUNK), "not stored"
stored = time.monotonic() - begin
b = Engine(0)
assert b.lookup("r1", ids) == 3 * CHUNK, "another number of tokens is found"
begin = time.monotonic()
assert b.retrieve("r1", ids, second, 0, 3 * CHUNK), "not read"
print(f"3 chunks stored in {1000 * stored:.1f} ms and read in {1000 * (time.monotonic() - begin):.1f} ms")
assert equal(a, first, b, second, 3 * CHUNK), "what was read is not what was stored"

assert a.lookup("r2", ids, salt="tenant") == 0, "another tenant's state is found"
c = Engine(2, world=2, rank=0)
assert c.store("r3", ids, first, 0, CHUNK) and c.lookup("r3", ids) == 0, "a chunk is found that one rank only has"
c.close()
print("tenants and ranks are kept apart")

want("kill node")
begin = time.monotonic()
assert a.store("r4", ids, first, 3 * CHUNK, 5 * CHUNK), "a store fails while the node is away"
assert a.lookup("r4", ids) == 0 and not a.retrieve("r4", ids, second, 0, CHUNK), "something is found while the node is away"
assert time.monotonic() - begin < 30, "a call waits for a node that is away"
want("start node")
assert b.lookup("r5", ids) == 3 * CHUNK, "what was stored is gone with the node"
assert a.store("r5", ids, first, 3 * CHUNK, 5 * CHUNK) and a.lookup("r6", ids) == 5 * CHUNK, "not stored when the node is back"

# The two halves of a store, and the node's death between them.
ctx = a.worker.transfer_ctx.engine_driven_context
late = list(range(1000, 1000 + CHUNK))
key = IPCCacheServerKey(model_name="tiny", world_size=1, worker_id=0, token_ids=tuple(late), start=0, end=CHUNK, request_id="r7", num_kv_readers=1)
slots, places = ctx.prepare_store(key, a.worker.instance_id)
assert places == [0] and list(slots[0].shape) == [2, LAYERS, CHUNK, HEADS * SIZE], f"slots {places} of {slots[0].shape}"
want("kill node")
slots[0].copy_(torch.arange(slots[0].numel()).reshape(slots[0].shape) % 251)
ctx.commit_store(key, a.worker.instance_id, [])
want("start node")
until("published", lambda: a.lookup(f"r8-{time.monotonic()}", late) == CHUNK)
got = ctx.prepare_retrieve(key, a.worker.instance_id)
assert got is not None and torch.equal(got[0], slots[0]), "another chunk than was written"
want("kill node")
want("start node")
assert torch.equal(got[0], slots[0]), "it has changed while it was read"
assert ctx.commit_retrieve(key, a.worker.instance_id)
print("the node was killed between the halves of a store and of a read")

# The server is killed: an engine that is not in a call goes on. Where a heart-beat falls into that time, it computes
# until the next one.
want("kill server")
want("start server")
for e in (a, b):
    until("found by a server that was started again", lambda: e.lookup(f"r9-{time.monotonic()}", ids) == 5 * CHUNK)
more = list(range(2000, 2000 + CHUNK))
until("stored by a server that was started again", lambda: a.store(f"r9-{time.monotonic()}", more, first, 0, CHUNK) and a.lookup(f"r10-{time.monotonic()}", more) == CHUNK)
until("read", lambda: b.worker.is_healthy and b.lookup(f"r9-{time.monotonic()}", ids) == 5 * CHUNK and b.retrieve("r9", ids, second, 0, 5 * CHUNK))
assert equal(a, first, b, second, 5 * CHUNK), "not what was stored"
print("the server was killed, and engines went on")

# It does not know them any more: they register again by themselves.
want("kill server")
want("forget")
want("start server")
for e in (a, b):
    until("registered again", lambda: e.worker.is_healthy and e.store(f"r11-{time.monotonic()}", ids, first, 0, CHUNK) and e.lookup(f"r12-{time.monotonic()}", ids) == 5 * CHUNK)
print("engines that the server had forgotten have registered again")

assert a.scheduler.reset_cache() and a.lookup("r13", ids) == 0, "something is found after Clear"
a.close()
b.close()
unknown = RequestClientFactory.create(url)
assert not unknown.prepare_retrieve(key, 12345).result(timeout=60).success, "an engine that nobody knows reads"
unknown.close()
print("passed", flush=True)
