"""Keeps values in a KV node with LMCache's native Redis client: lmcache_resp.py HOST PORT PASSWORD.

At the line "forget" on stdout the test restarts the node with another memory, and answers on stdin."""
import sys

from lmcache.v1.storage_backend.native_clients.resp_client import RESPClient

host, port, password = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SIZE = 1 << 20
keys = [f"tiny@1@0@{i:064x}@bfloat16" for i in range(4)]
values = [bytearray(bytes((i + j) % 251 for j in range(1024)) * (SIZE // 1024)) for i in range(4)]
client = RESPClient(host, port, 2, None, "", password)
assert client.batch_exists_sync(keys) == [False] * 4, "something is there"
client.batch_set_sync(keys[:3], [memoryview(v) for v in values[:3]])
assert client.batch_exists_sync(keys) == [True, True, True, False], "not what was stored"
got = [bytearray(SIZE) for _ in range(3)]
client.batch_get_sync(keys[:3], [memoryview(b) for b in got])
assert got == values[:3], "other bytes than were stored"
print("3 values of 1 MiB stored and read")
print("forget", flush=True)
assert sys.stdin.readline()
for key in (keys[0], keys[3]):  # one that was promised, and one that never was there
    other = RESPClient(host, port, 1, None, "", password)
    try:
        other.get_sync(key, memoryview(bytearray(SIZE)))
    except Exception as err:
        print("a miss is an error:", str(err)[:80])
    else:
        raise AssertionError("a value is read that is not there")
print("passed")
