r"""Streams an answer that survives the loss of its connection, and of this program.

    python3 resume.py http://127.0.0.1:10000/v1 answer.log \
        '{"model": "gemma-3-270m", "prompt": "Once upon a time", "max_tokens": 1000}'

Each event is a line of answer.log before it is printed. Killed and started again with
the same arguments, it prints what it has and goes on with the next event. Nothing but
Python's own library is needed.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request


def saved(log):
    """Returns the id of the last whole line, the text of all, and whether that is all."""
    last, text, over = "", "", False
    if os.path.exists(log):
        with open(log, "r+", encoding="utf-8") as f:
            lines = f.read().split("\n")
            f.seek(0)
            f.truncate(len("\n".join(lines[:-1] + [""]).encode()))  # a line that was cut is none
        for line in lines[:-1]:
            id_, data = line.split(" ", 1)
            last, over = id_ or last, data == "[DONE]"
            if not over:
                text += "".join(c.get("text", "") for c in json.loads(data)["choices"])
    return last, text, over


def events(response):
    """Yields id and data of each event; a comment or half an event is none."""
    id_, data = "", []
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        name, _, value = line.partition(":")
        if name == "id":
            id_ = value.strip()
        elif name == "data":
            data.append(value.strip())
        elif line == "" and data:
            yield id_, "\n".join(data)
            id_, data = "", []


def go_on(url, body, log):
    """Asks for the answer, or for the rest of it. Returns True at its end."""
    last, _, over = saved(log)
    if over:
        return True
    headers = {"Content-Type": "application/json", "x-kvmesh-resumable": "1"}
    if last:
        headers["Last-Event-ID"] = last
    request = urllib.request.Request(url + "/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response, open(log, "a", encoding="utf-8") as out:
        for id_, data in events(response):
            if '"error"' in data and "error" in json.loads(data):
                sys.exit(data)  # the mesh could not go on
            out.write(f"{id_} {data}\n")
            out.flush()
            if data == "[DONE]":
                return True
            print("".join(c.get("text", "") for c in json.loads(data)["choices"]), end="", flush=True)
    return False  # cut off: there was no [DONE]


def main():
    url, log, body = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    print(saved(log)[1], end="", flush=True)
    while True:
        try:
            if go_on(url, body | {"stream": True}, log):
                print()
                return
        except urllib.error.HTTPError as e:
            if e.code != 503:
                sys.exit(e.read().decode())  # 404: the stream has expired
        except OSError:
            pass  # the connection broke
        time.sleep(0.5)


if __name__ == "__main__":
    main()
