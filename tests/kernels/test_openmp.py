"""Native calls on the threads of torch's OpenMP, and on kvpact's own: the same results."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from kvpact.kernels import native_threads
from kvpact.kernels.cpu.library import entries

PROGRAM = """
import ctypes, hashlib, json, os, sys, threading
import torch
from kvpact import CacheGeometry, create_cache
from kvpact.kernels.cpu.library import library, native_threads
from kvpact.kernels.cpu.library import entries

raw, found = ctypes.CDLL(str(library().path)), {"threads": native_threads()}
address = lambda x: ctypes.cast(x, ctypes.c_void_p).value

def work(tokens=600):
    digest = hashlib.sha256()
    for spec in ("trellis:bits=4", "turboquant:bits=4", "int:bits=8", "kivi:bits=2"):
        cache = create_cache(spec, CacheGeometry(2, 4, 64))
        for count in (tokens, 1, 40, 1):
            for layer in range(2):
                shape, generator = (1, 16, count, 64), torch.Generator().manual_seed(layer)
                k, v, q = torch.randn(shape, generator=generator).split((4, 4, 8), 1)
                digest.update(cache.attend(layer, k=k, v=v, q=q).numpy().tobytes())
        digest.update(cache.dequantize(1, "k").numpy().tobytes())
    return digest.hexdigest()

def told(*given):
    return raw.kvp_openmp(*(ctypes.c_void_p(x) for x in given))

def in_a_child(threads):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(threads)  # torch's own are gone
        os.write(writing, work().encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reading, 100).decode()

torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)  # torch's threads are there, kvpact has had none
found["early"] = in_a_child(1)
torch.set_num_threads(1)
found["one"] = work()
torch.set_num_threads(3)
found["all"] = work()
torch.set_num_threads(2)
found["fewer"] = work()
threads, several = [], []
for _ in range(4):
    threads.append(threading.Thread(target=lambda: several.append(work())))
    threads[-1].start()
for thread in threads:
    thread.join()
found["several"] = several
found["child"] = in_a_child(1)

calls = []
@ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint,
                  ctypes.c_uint)
def gomp(part, data, count, flags):
    calls.append(("gomp", count, flags))
    for _ in range(count):
        part(data)

Part = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, Part, ctypes.c_void_p)
def fork(where, count, part, data):
    calls.append(("fork", count))
    part(None, None, data)
@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
def caller(where):
    return 7
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
def push(where, number, count):
    calls.append(("threads", number, count))

torch.set_num_threads(5)
assert told(address(gomp), 0, 0, 0) == 1
found["gomp"] = work()
found["calls"] = sorted(set(map(tuple, calls)))
del calls[:]
assert told(0, address(fork), address(caller), address(push)) == 1
found["llvm"] = work()
found["calls"] += sorted(set(map(tuple, calls)))
assert told(0, 0, 0, 0) == 0
found["own"] = work()
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(
    native_threads() == "no native calls" or not hasattr(os, "fork"), reason="no native library"
)


def run(**environment):
    given = {x: y for x, y in os.environ.items() if not x.startswith("OMP_")} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("policy", ["", "passive"])
def test_whoever_carries_calls_out_the_results_are_the_same(policy):
    found = run(**{"OMP_WAIT_POLICY": policy} if policy else {})
    where = "kvpact's own" if policy else "torch's OpenMP"
    assert found["threads"] == f"native calls on {where}"
    same = {
        found[name] for name in ("one", "early", "all", "fewer", "child", "gomp", "llvm", "own")
    }
    assert same == {found["one"]}
    assert found["several"] == 4 * [found["one"]]
    # All threads of a team take part, however few parts there are: a smaller one would end some.
    assert found["calls"] == [["gomp", 5, 0], ["fork", 1], ["threads", 7, 5]]


def test_torchs_own_openmp_is_found(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    gomp, *llvm = entries()
    assert gomp or all(llvm)
    if gomp:
        assert gomp == ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert entries() == (0, 0, 0, 0)
