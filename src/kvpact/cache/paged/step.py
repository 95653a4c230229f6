"""One layer's new tokens of many sequences of a paged cache: all of them, or none.

Where all rows take the step that they took before, one call of a backend carries it out, as `quick`
does for one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvpact.cache.layer.held import LayerPlan, exchange
from kvpact.cache.layer.quick import make_runner, quick_step
from kvpact.cache.layer.stored import Step
from kvpact.cache.paged.locks import SequencePages
from kvpact.cache.paged.sequence import KnownRows, PagedSequence
from kvpact.contract import AttendConfig
from kvpact.errors import CacheFull

Tokens = Mapping[int, tuple[Tensor, Tensor]]
Before = Callable[[list[LayerPlan]], None]


def store_rows(
    cache: SequencePages,
    layer: int,
    tokens: Tokens,
    configs: Mapping[int, AttendConfig],
    good: Sequence[Tensor | None],
    before: Before | None = None,
) -> list[Step]:
    """Carry out `PagedKVCache.step` of checked tokens; the layer's lock is held throughout."""
    with cache.layer_locks[layer]:
        counts = [k.shape[2] for k, _ in tokens.values()]
        size = sum(k.nbytes + v.nbytes for k, v in tokens.values())
        cache.heap.begin(max(counts, default=0), size, cache.device)
        with cache.pool.lock:
            sequences = [cache._sequence(seq) for seq in tokens]
            pages = [len(sequence.table) for sequence in sequences]
            cache.reserve(list(tokens), counts, layer)
        try:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.coming[layer] = sequence.layers[layer].length + count
            steps = _store(layer, sequences, tokens, configs, good, before)
            cache.heap.stored(layer + 1 == len(cache.specs))
            return steps
        except BaseException:
            give_back(cache, layer, sequences, pages)
            raise
        finally:
            # One that stays after a second interrupt keeps a few pages reserved, nothing more.
            for sequence in sequences:
                sequence.coming.pop(layer, None)


def _store(
    layer: int,
    sequences: list[PagedSequence],
    tokens: Tokens,
    configs: Mapping[int, AttendConfig],
    good: Sequence[Tensor | None],
    before: Before | None,
) -> list[Step]:
    entries = [sequence.layers[layer] for sequence in sequences]
    default, plans = AttendConfig(), []
    for entry, found, (seq, (k, v)) in zip(entries, good, tokens.items(), strict=True):
        with entry.compute.checking() as flags:
            if flags is not None and found is not None:
                flags.append(found)
            plans.append(entry.prepare(k, v, configs.get(seq, default)))
    if before is not None:
        before(plans)
    for entry, plan in zip(entries, plans, strict=True):
        entry.write(plan)
    exchange(entries, [plan.after for plan in plans])
    return [entry.stored(plan) for entry, plan in zip(entries, plans, strict=True)]


def give_back(
    cache: SequencePages, layer: int, sequences: list[PagedSequence], pages: list[int]
) -> None:
    """Give pages back that were reserved for tokens which are not stored after all."""

    def trim() -> None:
        for sequence, count in zip(sequences, pages, strict=True):
            # Other layers may have got here in the meantime, or be on their way.
            coming = [length for other, length in sequence.coming.items() if other != layer]
            used = max([sequence.length, *coming])
            cache._trim(sequence, max(count, -(-used // cache.pool.page_size)))

    cache._with_pages(trim)


def quick_rows(
    cache: SequencePages,
    layer: int,
    seqs: Sequence[int],
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
) -> Tensor | None:
    """Carry out `PagedView.attend` in one call of a backend; None, nothing stored, if it can't."""
    with cache.layer_locks[layer]:
        rows = cache.known_rows.pop(layer, None)
        if rows is None or rows.seqs != seqs or not rows.stand():
            rows = _find(cache, layer, seqs)
        if rows is None or not rows.runners[0].fits(k, v, q, config, len(seqs)):
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
                if cache.heap.active:
                    cache.heap.end()
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
    made = [entry._held.runner for entry in layers if entry.clean]
    runners = [runner for runner in made if runner is not None]
    if not len(seqs) == len(runners) == len(set(seqs)):
        return None
    if not all(runner.matches(runners[0]) for runner in runners):
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
        entry.clean = False
    output = rows.runners[0].run(steps, k, v, q)
    if output is not None:
        exchange(rows.layers, made)
        assert made[0].plan is not None
        encoded = [tokens.encoded > 0 for step in steps for tokens in (step.k, step.v)]
        made[0].plan.count(attend=len(made), encode=sum(encoded))
    for entry in rows.layers:
        entry.clean = True
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
        make_runner(entry, k_row, v_row, q_row, config)
