"""Steps of many sequences on pages in one call of a backend; `quick` does it for one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpact.cache.held import exchange
from kvpact.cache.layer import CacheLayer
from kvpact.cache.paged_step import give_back
from kvpact.cache.pages import PagePool
from kvpact.cache.quick import make_runner, moved, quick_step
from kvpact.cache.sequences import PagedSequence
from kvpact.contract import AttendConfig
from kvpact.errors import CacheFull
from kvpact.kernels import StepRow

if TYPE_CHECKING:
    from kvpact.cache.paged import PagedKVCache


def quick_rows(
    cache: PagedKVCache,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> Tensor | None:
    """Carry out `PagedView.attend` in one call of a backend.

    Parameters
    ----------
    cache : PagedKVCache
        Holds the sequences.
    layer : int
        One of its layers.
    seqs : sequence of int
        A sequence for each row.
    k, v, q, config
        As of `PagedView.attend`, not yet checked.

    Returns
    -------
    Tensor or None
        The output. None where the ordinary way has to be taken; nothing is stored then.
    """
    with cache.layer_locks[layer]:
        found = [cache._sequences.get(seq) for seq in seqs]
        rows = [row for row in found if row is not None]
        entries = [row.layers[layer] for row in rows]
        if len(rows) < len(seqs) or len(set(seqs)) < len(seqs):
            return None
        if not _alike(entries, k, v, q, config):
            return None
        with cache.pool.lock:
            pages = [len(row.table) for row in rows]
            try:
                if not _has_room(cache.pool, rows, entries, k.shape[2]):
                    cache.reserve(list(seqs), [k.shape[2]] * len(seqs), layer)
            except CacheFull:
                return None
        output = None
        try:
            for row, entry in zip(rows, entries, strict=True):
                row.coming[layer] = entry.length + k.shape[2]
            output = _run(entries, k, v, q, config)
        finally:
            if output is None:
                give_back(cache, layer, rows, pages)
            for row in rows:
                row.coming.pop(layer, None)
        return output


def _alike(
    entries: list[CacheLayer], k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> bool:
    """Whether all rows take the same step as before."""
    runners = [entry._held.runner for entry in entries]
    first = runners[0] if runners else None
    if first is None or not first.fits_rows(k, v, q, config) or k.shape[0] != len(entries):
        return False
    if not all(runner is not None and first.alike(runner) for runner in runners):
        return False
    return all(entry._clean for entry in entries)


def _has_room(
    pool: PagePool, rows: list[PagedSequence], entries: list[CacheLayer], new: int
) -> bool:
    """Whether the new tokens' pages are there, and nobody else's."""
    size, references = pool.page_size, pool.references
    if not pool.counted:
        return False
    for row, entry in zip(rows, entries, strict=True):
        k, v = entry._held.k, entry._held.v
        assert k is not None and v is not None
        if k.length + new > len(row.table) * size:
            return False
        first = min(k.packed, v.packed) // size
        if any(references[page] != 1 for page in row.table[first:]):
            return False
    return True


def _run(
    entries: list[CacheLayer], k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> Tensor | None:
    made, steps, encodes = [], [], 0
    tokens = zip(*(torch.split(x, 1) for x in (k, v, q)), strict=True)
    for entry, (k_row, v_row, q_row) in zip(entries, tokens, strict=True):
        step = quick_step(entry._held, k_row, v_row)
        runner = step and moved(entry, step, k_row, v_row, q_row, config)
        if step is None or runner is None:
            return None
        made.append(
            step.after if runner is step.after.runner else step.after._replace(runner=runner)
        )
        steps.append(StepRow(runner, step.length - k.shape[2], step.sides))
        encodes += step.encodes
    for entry in entries:
        entry._clean = False
    output = steps[0].runner.run_rows(steps, k, v, q)
    if output is not None:
        exchange(entries, made)
        assert made[0].plan is not None
        made[0].plan.count_step(len(made), encodes)
    for entry in entries:
        entry._clean = True
    return output


def make_runners(
    cache: PagedKVCache,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> None:
    """Let rows take their next steps at once, if they just took the same step again."""
    tokens = zip(*(torch.split(x, 1) for x in (k, v, q)), strict=True)
    for seq, (k_row, v_row, q_row) in zip(seqs, tokens, strict=True):
        make_runner(cache._sequences[seq].layers[layer], k_row, v_row, q_row, config)
