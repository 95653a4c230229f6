"""What malloc is told while prompts are stored, and when that ends."""

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.kernels.cpu import heap
from kvpact.kernels.cpu.heap import LARGE, Hold, giving_back, malloc_here


class Told:
    """Stands for the functions of the library."""

    def __init__(self):
        self.holders, self.trims = 0, 0

    def heap_hold(self, change):
        self.holders += change
        return self.holders

    def heap_trim(self):
        self.trims += 1


@pytest.fixture
def told(monkeypatch):
    told = Told()
    monkeypatch.setattr(heap, "_native", lambda: told)
    return told


def test_a_prompt_begins_once_and_ends_with_its_last_layer(told):
    hold = Hold()
    for layer in range(3):
        hold.begin(100)
        hold.stored(layer == 2)
        assert told.holders == (layer < 2)
    assert hold.active
    hold.begin(1)
    assert not hold.active
    assert told.trims == 0


@pytest.mark.parametrize("size", [LARGE - 1, LARGE])
def test_what_is_free_is_given_back_once_behind_a_large_call(told, size):
    hold = Hold()
    hold.begin(100, size)
    hold.begin(100, 1)
    hold.stored(True)
    for _ in range(2):
        hold.begin(1)
    assert told.trims == (size == LARGE)


def test_it_lasts_as_long_as_a_tensor(told):
    hold, positions = Hold(), torch.arange(3)
    hold.begin(9, LARGE)
    for _ in range(2):
        hold.until(positions)
        hold.stored(True)
    assert told.holders == 1
    del positions
    assert (told.holders, told.trims, hold.active) == (0, 1, False)
    hold.begin(9)
    hold.until(None)
    hold.stored(True)
    assert told.holders == 0


def test_a_tensor_of_a_call_that_has_ended_ends_nothing_of_the_next(told):
    hold, first, second = Hold(), torch.arange(3), torch.arange(3)
    hold.begin(9)
    hold.until(first)
    hold.begin(1)
    hold.begin(9)
    hold.until(second)
    del first
    assert told.holders == 1
    del second
    assert told.holders == 0


def test_steps_and_calls_of_few_tokens_begin_nothing(told):
    hold = Hold()
    hold.begin(8)
    hold.until(torch.arange(3))
    hold.stored(True)
    assert told.holders == told.trims == hold.active == 0


@pytest.mark.parametrize("window,tokens,held", [(0, 900, 0), (100, 200, 0), (100, 201, 1)])
def test_prompts_much_longer_than_a_window_are_held_to_their_end(told, window, tokens, held):
    """Others keep copies of the window, which would come to lie between activations."""
    hold = copy.deepcopy(Hold(window))
    hold.begin(tokens)
    hold.early()
    assert told.holders == held
    hold.begin(tokens, hold=False)
    assert told.holders == held
    hold.end()
    assert told.holders == 0 == hold.active


def test_a_hold_ends_with_its_cache_and_its_copy_is_another_one(told):
    hold = Hold()
    hold.begin(9)
    other = copy.deepcopy(hold)
    assert not other.active
    other.begin(9)
    assert told.holders == 2
    del hold
    assert told.holders == 1
    other.end()
    del other
    assert told.holders == 0


def test_an_error_within_gives_back_all_the_same(told):
    with pytest.raises(ValueError, match="x"), giving_back():
        assert told.holders == 1
        raise ValueError("x")
    assert (told.holders, told.trims) == (0, 1)


def test_contiguous_caches_tell_of_prompts_and_not_of_steps(told):
    cache = create_cache("int:bits=8", CacheGeometry(2, 2, 32))
    seen = []
    for tokens in (70, 1, 20, 1):
        for layer in range(2):
            k, v, q = torch.randn(3, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(1))
            cache.attend(layer, k=k, v=v, q=q)
            seen.append(told.holders)
    assert seen == [1, 0, 0, 0, 1, 0, 0, 0]
    fork = cache.fork()
    assert fork.heap is not cache.heap
    cache.store(0, k=k.expand(-1, -1, 20, -1), v=v.expand(-1, -1, 20, -1))
    assert told.holders == 1
    del cache
    assert told.holders == 0


@pytest.mark.parametrize(("device", "holders"), [("cpu", 1), ("meta", 0), ("cuda", 0)])
def test_tensors_elsewhere_begin_nothing(told, device, holders):
    hold = Hold()
    hold.begin(100, LARGE, torch.device(device))
    assert (told.holders, hold.active) == (holders, bool(holders))
    hold.end()


@pytest.mark.parametrize("gpu", [False, True])
def test_an_unknown_device_is_the_gpu_that_a_process_uses(told, monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    hold, other = Hold(), Hold()
    hold.begin(100)
    assert told.holders == (not gpu)
    other.begin(100, device=torch.device("cpu"))
    assert told.holders == 1 + (not gpu)


def test_caches_say_where_their_tokens_are(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # whatever is not said
    k = torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(1))
    cache = create_cache("int:bits=8", CacheGeometry(2, 2, 32))
    cache.store(0, k=k, v=k)
    assert told.holders == 1
    other = create_cache("int:bits=8", CacheGeometry(2, 2, 32))
    other.attend(0, k=k, v=k, q=k)
    assert told.holders == 2
    pages = PagedKVCache("int:bits=8", CacheGeometry(2, 2, 32), num_pages=4, page_size=64)
    pages.append(0, {pages.allocate(): (k[0], k[0])})
    assert told.holders == 3
    for held in (cache, other, pages):
        held.heap.end()


@pytest.mark.parametrize(("tokens", "trims"), [(100, 0), (4000, 1)])
def test_rows_of_large_caches_give_back_what_was_before(told, tokens, trims):
    cache = create_cache("int:bits=8", CacheGeometry(1, 2, 32))
    k = torch.randn(2, 2, tokens, 32, generator=torch.Generator().manual_seed(1))
    cache.store(0, k=k, v=k)
    held = told.trims
    cache.reorder(torch.tensor([1, 1]))
    assert told.trims - held == trims


def test_pages_tell_of_prompts_and_not_of_many_rows_of_a_step(told):
    cache = PagedKVCache("int:bits=8", CacheGeometry(2, 2, 32), num_pages=40, page_size=64)
    view, seen = cache.view([cache.allocate() for _ in range(12)]), []
    for tokens in (70, 1, 1):
        for layer in range(2):
            k, v, q = torch.randn(3, 12, 2, tokens, 32, generator=torch.Generator().manual_seed(1))
            view.attend(layer, k=k, v=v, q=q)
            seen.append(told.holders)
    assert seen == [1, 0, 0, 0, 0, 0]
    assert not cache.heap.active


PROGRAM = """
import ctypes, json
from kvpact.kernels.cpu.heap import Hold, malloc_here

class Info(ctypes.Structure):
    _fields_ = [(x, ctypes.c_size_t) for x in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = (ctypes.c_size_t,)

def mapped(size):
    before, block = libc.mallinfo2().hblks, libc.malloc(size)
    found = libc.mallinfo2().hblks - before
    libc.free(block)
    return found

libc.free(libc.malloc(30 << 20))  # from now on glibc keeps such blocks
hold, seen = Hold(), [mapped(20 << 20)]
hold.begin(100)
seen += [mapped(25 << 20), mapped(100 << 10)]  # more than the heap has by now, and less
hold.end()
seen += [mapped(28 << 20), mapped(40 << 20)]
print(json.dumps([seen, *malloc_here()]))
"""


def run(**environment):
    command, given = [sys.executable, "-c", PROGRAM], os.environ | environment
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_glibc = pytest.mark.skipif(bool(malloc_here().reason), reason=str(malloc_here()))


@needs_glibc
def test_large_blocks_come_from_the_system_while_a_prompt_is_stored():
    seen, name, reason = run()
    assert seen == [0, 1, 0, 0, 1]
    assert name.startswith("glibc ")
    assert not reason


@needs_glibc
@pytest.mark.parametrize(("variable", "value"), [
    ("KVPACT_MALLOC", "keep"),
    ("MALLOC_TRIM_THRESHOLD_", "1000000"),
    ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
])  # fmt: skip
def test_malloc_is_left_as_it_is_where_somebody_says_so(variable, value):
    seen, _, reason = run(**{variable: value})
    assert seen[1] == seen[0]
    assert reason == f"{variable} is set"


def test_threads_that_begin_and_end_at_once_leave_no_holder(told):
    hold, start = Hold(), threading.Barrier(4)
    changes = []
    told.heap_hold = changes.append

    def work():
        start.wait()
        for _ in range(300):
            hold.begin(9)
            hold.end()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: work(), range(4)))
    hold.end()
    assert len(changes) >= 2
    assert sum(changes) == 0
