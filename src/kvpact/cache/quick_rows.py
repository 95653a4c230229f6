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
from kvpact.kernels import StepRow, StepRunner

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
        rows = _rows(cache, layer, seqs, k, v, q, config)
        if rows is None:
            return None
        with cache.pool.lock:
            pages = [len(row.table) for row, _, _ in rows]
            try:
                if not _have_room(cache.pool, rows, k.shape[2]):
                    cache.reserve(list(seqs), [k.shape[2]] * len(seqs), layer)
            except CacheFull:
                return None
        output = None
        try:
            for row, _, length in rows:
                row.coming[layer] = length + k.shape[2]
            output = _run([entry for _, entry, _ in rows], k, v, q, config)
        finally:
            if output is None:
                give_back(cache, layer, [row for row, _, _ in rows], pages)
            for row, _, _ in rows:
                row.coming.pop(layer, None)
        return output


_Row = tuple[PagedSequence, CacheLayer, int]
"""A sequence, its layer, and the tokens that this holds."""


def _rows(
    cache: PagedKVCache,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> list[_Row] | None:
    """Return the rows, if all of them take the same step as before."""
    rows: list[_Row] = []
    first: StepRunner | None = None
    for seq in seqs:
        row = cache._sequences.get(seq)
        if row is None:
            return None
        entry = row.layers[layer]
        held = entry._held
        runner, stream = held.runner, held.k
        if runner is None or stream is None or not entry._clean:
            return None
        if first is None:
            first = runner
            if not first.fits_rows(k, v, q, config) or k.shape[0] != len(seqs):
                return None
        elif not first.alike(runner):
            return None
        rows.append((row, entry, stream.length))
    return rows if len(rows) == 1 or len(set(seqs)) == len(rows) else None


def _have_room(pool: PagePool, rows: list[_Row], new: int) -> bool:
    """Whether the new tokens' pages are there, and nobody else's."""
    size, references = pool.page_size, pool.references
    if not pool.counted:
        return False
    for row, entry, length in rows:
        k, v = entry._held.k, entry._held.v
        assert k is not None and v is not None
        if length + new > len(row.table) * size:
            return False
        first = min(k.packed, v.packed) // size
        if any(references[page] != 1 for page in row.table[first:]):
            return False
    return True


def _run(
    entries: list[CacheLayer], k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> Tensor | None:
    made, steps, encodes = [], [], 0
    new = k.shape[2]
    for row, entry in enumerate(entries):
        step = quick_step(entry._held, k, v, row)
        runner = step and moved(entry, step, k, v, q, config, row)
        if step is None or runner is None:
            return None
        made.append(
            step.after if runner is step.after.runner else step.after._replace(runner=runner)
        )
        steps.append(StepRow(runner, step.length - new, step.sides))
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
