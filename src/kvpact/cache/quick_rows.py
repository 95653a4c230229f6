"""Steps of many sequences on pages in one call of a backend; `quick` does it for one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.cache.held import exchange
from kvpact.cache.paged_step import give_back
from kvpact.cache.quick import encodes, make_runner, quick_step
from kvpact.cache.sequence_pages import SequencePages
from kvpact.cache.sequences import KnownRows
from kvpact.contract import AttendConfig
from kvpact.errors import CacheFull


def quick_rows(
    cache: SequencePages,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> Tensor | None:
    """Carry out `PagedView.attend` in one call of a backend.

    `seqs`: a sequence for each row; `k`, `v`, `q`, `config`: as of `PagedView.attend`, not yet
    checked. None where the ordinary way has to be taken; nothing is stored then.
    """
    with cache.layer_locks[layer]:
        rows = cache.known_rows.pop(layer, None)
        if rows is None or rows.seqs != seqs or not rows.stand():
            rows = _find(cache, layer, seqs)
        if rows is None or not rows.runners[0].fits_rows(k, v, q, config, len(seqs)):
            return None
        new, pool = k.shape[2], cache.pool
        with pool.lock:
            pages = [len(sequence.table) for sequence in rows.sequences]
            changes = rows.changes
            rows = rows.counted(pool)
            if rows.room < new:
                try:
                    cache.reserve(rows.seqs, new, layer)
                except CacheFull:
                    return None
                rows = rows.counted(pool)
        output, stay = None, rows.changes == changes
        try:
            for sequence, entry in zip(rows.sequences, rows.layers, strict=True):
                sequence.coming[layer] = entry._held.length + new
            output = _run(rows, k, v, q, config, stay)
            if output is not None:
                cache.known_rows[layer] = rows.after(new)
        finally:
            if output is None:
                give_back(cache, layer, rows.sequences, pages)
            for sequence in rows.sequences:
                sequence.coming.pop(layer, None)
        return output


def _find(cache: SequencePages, layer: int, seqs: Sequence[int]) -> KnownRows | None:
    """Return the rows, if all of them take the same step as before."""
    found = [cache._sequences.get(seq) for seq in seqs]
    sequences = [sequence for sequence in found if sequence is not None]
    layers = [sequence.layers[layer] for sequence in sequences]
    made = [entry._held.runner for entry in layers if entry._clean]
    runners = [runner for runner in made if runner is not None]
    if not len(seqs) == len(runners) == len(set(seqs)):
        return None
    if not all(runner.alike(runners[0]) for runner in runners):
        return None
    return KnownRows(list(seqs), sequences, layers, runners)


def _run(
    rows: KnownRows, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, stay: bool
) -> Tensor | None:
    made, steps = [], []
    for index, entry in enumerate(rows.layers):
        step = quick_step(entry, k, v, q, config, index, stay)
        if step is None:
            return None
        made.append(step[0])
        steps.append(step[1])
    for entry in rows.layers:
        entry._clean = False
    output = rows.runners[0].run(steps, k, v, q)
    if output is not None:
        exchange(rows.layers, made)
        assert made[0].plan is not None
        made[0].plan.count_step(len(made), sum(map(encodes, steps)))
    for entry in rows.layers:
        entry._clean = True
    return output


def make_runners(
    cache: SequencePages,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> None:
    """Let rows take this step, and those that are like it, at once."""
    tokens = zip(*(torch.split(x, 1) for x in (k, v, q)), strict=True)
    for seq, (k_row, v_row, q_row) in zip(seqs, tokens, strict=True):
        entry = cache._sequence(seq).layers[layer]
        make_runner(entry, k_row, v_row, q_row, config, None)
