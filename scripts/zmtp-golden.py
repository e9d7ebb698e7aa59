"""Writes internal/zmtp/testdata/libzmq.txt: what sockets of the real ZeroMQ send. Run it with a Python that has
pyzmq, such as the one that scripts/vllm.sh prints, and the file.

    eval "$(sh scripts/vllm.sh)" && "$KVMESH_VLLM" scripts/zmtp-golden.py internal/zmtp/testdata/libzmq.txt
"""

import socket
import sys
import threading

import zmq


def record(kind, talk):
    """What a socket of libzmq sends to a peer that answers with the greeting and READY of `talk`."""
    listener = socket.create_server(("127.0.0.1", 0))
    z = zmq.Context.instance().socket(kind)
    z.linger = 0
    z.connect("tcp://127.0.0.1:%d" % listener.getsockname()[1])
    if kind == zmq.SUB:
        z.subscribe(b"kv@")
    c, _ = listener.accept()
    greeting = b"\xff" + 8 * b"\0" + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + 31 * b"\0"
    ready = b"\x05READY\x0bSocket-Type" + len(talk).to_bytes(4, "big") + talk
    c.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    if kind == zmq.REQ:
        z.send((7).to_bytes(8, "big"))
    if kind == zmq.PUB:
        c.sendall(b"\x00\x01\x01")  # everything

        def publish():
            while not done.wait(0.02):
                z.send_multipart((b"kv@", (9).to_bytes(8, "big"), 300 * b"x"))

        done = threading.Event()
        publisher = threading.Thread(target=publish)
        publisher.start()
    want = {zmq.SUB: b"\x00\x04\x01kv@", zmq.REQ: b"\x01\x00\x00\x08" + (7).to_bytes(8, "big"), zmq.PUB: 300 * b"x"}[kind]
    got = b""
    while want not in got:
        more = c.recv(1 << 16)
        assert more, (kind, got)
        got += more
    if kind == zmq.PUB:
        done.set()
        publisher.join()
    z.close()
    c.close()
    return got[: got.index(want) + len(want)]


with open(sys.argv[1], "w") as f:
    for name, kind, talk in (("SUB", zmq.SUB, b"PUB"), ("REQ", zmq.REQ, b"ROUTER"), ("PUB", zmq.PUB, b"SUB")):
        f.write("%s %s\n" % (name, record(kind, talk).hex()))
