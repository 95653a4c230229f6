"""One layer's new tokens of many sequences of a paged cache: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvpact.cache.held import LayerPlan, exchange
from kvpact.cache.sequence_pages import SequencePages
from kvpact.cache.sequences import PagedSequence
from kvpact.cache.step import Step
from kvpact.contract import AttendConfig

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
    """Carry out `PagedKVCache.step`; the tokens were checked, as `good` tells.

    The layer's lock is held from the count of the pages to the end, so two calls for one layer go
    one after the other, and nobody cuts or frees a sequence in between.
    """
    with cache.layer_locks[layer]:
        counts = [k.shape[2] for k, _ in tokens.values()]
        with cache.pool.lock:
            sequences = [cache._sequence(seq) for seq in tokens]
            pages = [len(sequence.table) for sequence in sequences]
            cache.reserve(list(tokens), counts, layer)
        try:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.coming[layer] = sequence.layers[layer].length + count
            return _store(layer, sequences, tokens, configs, good, before)
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
