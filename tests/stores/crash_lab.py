"""Forks writers, and kills them; prints what the store looked like afterwards, as JSON.

`crash_lab.py kills FOLDER KILLS SEED`, `crowd FOLDER PROCESSES SECONDS` or `steps FOLDER`.
"""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

from kvpact.stores import DirectoryStore
from kvpact.stores.directory_files import Blobs
from kvpact.stores.directory_index import IndexRows

KEYS = [f"key{i}" for i in range(12)]


def blob_of(key, number):
    """A blob that tells whose it is: any mixture of two is found."""
    size = 200 + number * 7919 % 150_000
    return f"{key}:{number}:".encode() + random.Random(f"{key}:{number}").randbytes(size)


def is_blob_of(key, blob):
    owner, number, _ = blob.split(b":", 2)
    return owner == key.encode() and blob == blob_of(key, int(number))


def writer(folder, seed, ready):
    """Put, replace and delete for ever."""
    draw = random.Random(seed)
    with DirectoryStore(folder, max_bytes=600_000) as store:
        os.write(ready, b"x")
        number = 0
        while True:
            key = draw.choice(KEYS)
            if draw.random() < 0.15:
                store.delete(key)
            elif draw.random() < 0.05:
                store.gc()
            else:
                store.put(key, blob_of(key, seed * 1000 + number))
            number += 1


def killed_once(folder, seed, delay):
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            writer(folder, seed, tell)
        finally:
            os._exit(1)
    os.close(tell)
    os.read(ready, 1)
    select.select([], [], [], delay)  # the moment is what this is about
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(ready)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kills(folder, count, seed):
    draw = random.Random(seed)
    result = {"kills": 0, "read": 0, "wrong": 0, "damaged": 0, "ghosts": 0, "leftovers": 0}
    result |= {"stray": 0, "over": 0, "rebuilt": 0}
    warnings.simplefilter("ignore")
    for turn in range(count):
        result["kills"] += killed_once(folder, seed * 1000 + turn, draw.random() * 0.03)
        with DirectoryStore(folder, max_bytes=600_000) as store:
            for key in KEYS:
                shown, blob = key in store, store.get(key)
                result["ghosts"] += shown != (blob is not None)
                if blob is not None:
                    result["read"] += 1
                    result["wrong"] += not is_blob_of(key, blob)
            result["damaged"] += store.stats().damaged
            result["over"] += store.stats().bytes > 600_000
            if turn % 5 == 4:
                held = {key: store.get(key) for key in store}
                result["leftovers"] += store.gc().leftovers
                inside = (p for p in folder.rglob("*") if p.parent.name != folder.name)
                files = [p for p in inside if p.is_file()]
                result["stray"] += len(files) - len(held)
                if turn % 20 == 19:
                    store.rebuild()
                    result["rebuilt"] += {key: store.get(key) for key in store} == held
    return result


def forked(work):
    """Run `work` in a child; return its pid and where its result comes out, as JSON."""
    out, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(tell, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    return pid, out


def one_of_a_crowd(folder, seed, seconds):
    draw = random.Random(seed)
    counts = {"puts": 0, "hits": 0, "misses": 0, "wrong": 0}
    warnings.simplefilter("error")  # a damaged entry or a failed index is an error here
    end = time.monotonic() + seconds
    with DirectoryStore(folder, max_bytes=500_000) as store:
        while time.monotonic() < end:
            key, what = draw.choice(KEYS), draw.random()
            if what < 0.3:
                store.put(key, blob_of(key, seed * 100_000 + counts["puts"]))
                counts["puts"] += 1
            elif what < 0.35:
                store.delete(key)
            elif what < 0.37:
                store.gc(verify=True)
            else:
                blob = store.get(key)
                counts["misses" if blob is None else "hits"] += 1
                counts["wrong"] += blob is not None and not is_blob_of(key, blob)
        counts["damaged"] = store.stats().damaged
    return counts


def crowd(folder, processes, seconds):
    works = [partial(one_of_a_crowd, folder, seed, seconds) for seed in range(processes)]
    children = [forked(work) for work in works]
    counts = [json.loads(os.read(out, 10_000) or "null") for _, out in children]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid, _ in children)
    return counts


def put_until(folder, left):
    """Kill this process at the `left`-th thing that a put does to disk or index."""

    def step(call):
        def counted(*args):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*args)

        return counted

    with DirectoryStore(folder) as store:
        os.fsync, os.replace, os.write = step(os.fsync), step(os.replace), step(os.write)
        for owner, name in ((Blobs, "remove"), (IndexRows, "put"), (IndexRows, "get")):
            setattr(owner, name, step(getattr(owner, name)))
        store.put("a", b"second" * 100)
    os._exit(0)


def steps(folder):
    seen, status = [], None
    while status != 0:
        place = folder / str(len(seen))
        with DirectoryStore(place) as store:
            store.put("a", b"first")
        pid, _ = forked(lambda place=place: put_until(place, len(seen)))
        _, status = os.waitpid(pid, 0)
        assert status == 0 or os.WIFSIGNALED(status)
        with DirectoryStore(place) as store:
            keys, blob = list(store), store.get("a")
            store.gc()
        files = [path.parent.parent.name for path in place.glob("blobs/*/*")]
        seen.append([keys, blob[:6].decode(), files, os.listdir(place / "tmp")])
    return seen


if __name__ == "__main__":
    name, place, *numbers = sys.argv[1:]
    work = {"kills": kills, "crowd": crowd, "steps": steps}[name]
    print(json.dumps(work(Path(place), *map(int, numbers))))
