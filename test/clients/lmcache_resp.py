"""Keeps values in a KV node with LMCache's native Redis client: lmcache_resp.py HOST PORT PASSWORD.

At the line "forget" on stdout the test restarts the node with another memory, and answers on stdin."""
import sys
import time

from lmcache.lmcache_redis import LMCacheRedisClient

host, port, password = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SIZE = 1 << 20


class Client:
    """The native client, with calls that wait."""

    def __init__(self, workers):
        self.native = LMCacheRedisClient(host, port, workers, "", password)

    def wait(self, future):
        deadline = time.monotonic() + 60
        while True:
            for fid, ok, error, result in self.native.drain_completions():
                assert int(fid) == int(future)
                if not ok:
                    raise RuntimeError(str(error))
                return result
            assert time.monotonic() < deadline, "the client hangs"
            time.sleep(0.002)

    def set(self, keys, bufs):
        self.wait(self.native.submit_batch_set(keys, [memoryview(b) for b in bufs]))

    def get(self, keys, bufs):
        """Whether each was read; None where the client does not say, and all were."""
        return self.wait(self.native.submit_batch_get(keys, [memoryview(b) for b in bufs]))

    def exists(self, keys):
        return [bool(b) for b in self.wait(self.native.submit_batch_exists(keys))]


keys = [f"tiny@1@0@{i:064x}@bfloat16" for i in range(4)]
values = [bytearray(bytes((i + j) % 251 for j in range(1024)) * (SIZE // 1024)) for i in range(4)]
client = Client(2)
assert client.exists(keys) == [False] * 4, "something is there"
client.set(keys[:3], values[:3])
assert client.exists(keys) == [True, True, True, False], "not what was stored"
got = [bytearray(SIZE) for _ in range(3)]
read = client.get(keys[:3], got)
assert got == values[:3] and (not read or all(read)), "other bytes than were stored"
print("3 values of 1 MiB stored and read")
print("forget", flush=True)
assert sys.stdin.readline()
for key in (keys[0], keys[3]):  # one that was there, and one that never was
    try:
        read = Client(1).get([key], [bytearray(SIZE)])
        assert read and not any(read), f"a value is read that is not there: {read}"
    except RuntimeError as err:
        print("a miss is an error:", str(err)[:80])
print("two misses ended at once")
print("passed", flush=True)
