"""Sequences of unlike lengths: one native call for all rows, each as if it were alone."""

import threading

import pytest
import torch
from closeness import WHOLE_BOUND, error

from kvpact import AttendConfig, CacheGeometry, PagedKVCache
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

HEADS, GROUPS, DIM, LENGTHS = 3, 2, 64, (1, 31, 700, 129, 33)


def filled(kernel, spec="turboquant:bits=4", lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    geometry = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
    cache = PagedKVCache(spec, geometry, 128, 64, backend=kernel)
    seqs = [cache.allocate() for _ in lengths]
    for seq, length in zip(seqs, lengths, strict=True):
        if length:
            cache.append(0, {seq: tuple(torch.randn(2, HEADS, length, DIM, generator=generator))})
    return cache, cache.view(seqs)


def given(rows, new=1):
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, rows, HEADS, new, DIM, generator=generator)
    return k, v, torch.randn(rows, HEADS * GROUPS, new, DIM, generator=generator)


@pytest.mark.parametrize("exact_new", (True, False))
@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=2,group=32", "fp8/int:bits=8"))
def test_one_call_for_all_rows(monkeypatch, spec, exact_new):
    counts, carry_out = [], native.attend_native

    def attend_native(library, calls):
        counts.append(len(calls))
        return carry_out(library, calls)

    monkeypatch.setattr(native, "attend_native", attend_native)
    monkeypatch.setattr(native, "new_output", lambda *shape: torch.full(shape, torch.nan))
    configs = [
        AttendConfig(exact_new=exact_new, sliding_window=50, softcap=20.0),
        AttendConfig(exact_new=exact_new, padding=torch.tensor([0, 3, 2, 0, 30])),
    ]
    mask = torch.randn(5, 1, 9, max(LENGTHS) + 27)
    outputs = []
    for kernel in ("torch", "cpu"):
        cache, view = filled(kernel, spec)
        k, v, q = given(len(LENGTHS), 9)  # too many for a step
        found = [view.attend(0, k=k, v=v, q=q, config=config) for config in configs]
        total = max(cache.seq_len(seq) for seq in view.seqs) + 9
        config = AttendConfig(exact_new=exact_new, mask=mask[..., :total])
        outputs.append([*found, view.attend(0, k=k, v=v, q=q, config=config)])
        calls = dict(cache.stats()["compute"]["attend"])
    assert counts == [len(LENGTHS)] * 3 and calls == {"cpu": 3 * len(LENGTHS)}
    for expected, found in zip(*outputs, strict=True):
        assert error(expected, found) <= WHOLE_BOUND


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_the_same_numbers_alone_and_together(threads, set_threads):
    set_threads(threads)
    lengths = (3000, 5, 0, 900, 64, 1200, 40)[: 7 - threads]
    (_, together), (cache, alone) = (filled("cpu", "int:bits=4", lengths) for _ in "ab")
    k, v, q = given(len(lengths))
    found = together.attend(0, k=k, v=v, q=q)
    for i, seq in enumerate(alone.seqs):
        one = cache.view([seq]).attend(0, k=k[i : i + 1], v=v[i : i + 1], q=q[i : i + 1])
        # Weights are rounded beside the greatest of a task's tokens: tasks differ.
        assert error(one, found[i : i + 1]) <= 1e-5


def test_views_with_the_same_rows_in_other_orders_do_not_wait_for_each_other_forever():
    cache, view = filled("cpu")
    views = [view, cache.view(view.seqs[::-1])]
    k, v, q = given(len(LENGTHS))
    config = AttendConfig(exact_new=False)

    def work(one):
        for _ in range(40):
            one.attend(0, k=k, v=v, q=q, config=config)

    workers = [threading.Thread(target=work, args=(one,), daemon=True) for one in views]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    assert cache.seq_len(view.seqs[0]) == LENGTHS[0] + 80
