"""Layers whose model compresses tokens to *entries* itself: DeepSeek V4.

Such a layer attends to a window of tokens and, beyond it, to one entry for each 4 or 128 of them.
Entries are a stream, here packed by the spec's method for K; those by which the layer chooses what
it attends to are keys of an index. Tokens that make no whole entry yet, and what the next entry
shares with the last one, are states.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.integrations.transformers.held.handles import refuse_gradients
from kvpact.integrations.transformers.held.new_tokens import as_stored
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.indexed import IndexKeys


class EntriesLayer(IndexKeys):
    """The part of a layer that packs its entries, as latents; the other base is the model's own."""

    _layer_type = None  # lest transformers take this for its own class of such layers
    is_croppable = False
    compress_rate: int
    cumulative_length: int
    keys: Tensor
    entry_count: dict[str, int]
    buffer_kv: dict[str, Tensor | None]

    def __init__(self, shared: SharedState, index: int, **options: Any) -> None:
        super().__init__(**options)
        self._shared, self._index = shared, index
        self.forget_keys()

    @property
    def values(self) -> Tensor:
        """The window's V, which is its K."""
        return self.keys

    @values.setter
    def values(self, values: Tensor) -> None:
        """Do nothing: the model's class names K a second time."""

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Append entries `[B, n, D]`; return all of them, the new ones as they are."""
        whole = self._append(compressed) if name == "compressor" else self.append_keys(compressed)
        self.entry_count[name] += compressed.shape[1]
        if torch.is_grad_enabled() and compressed.requires_grad:
            return refuse_gradients(whole.detach())
        return whole

    def _append(self, entries: Tensor) -> Tensor:
        shared, index = self._shared, self._index
        new = entries.detach()[:, None]
        cache = shared.held[index]
        dtype = None if cache is None else cache.geometry.dtype
        k, v = as_stored(new, new.new_zeros(*new.shape[:3], 1), dtype)
        cache = shared.cache_for(index, k, v) if cache is None else cache
        assert isinstance(cache, ContiguousCache)
        if k.shape[2]:
            config = AttendConfig(exact_new=shared.exact_new)
            whole = cache.prefill(index, k, v, None, config).v
        elif cache.seq_len(index):
            whole = cache.dequantize(index, "k")
        else:
            return entries
        return whole[:, 0].to(entries.dtype)

    def entries(self, tokens: int) -> int:
        """Return how many entries stand for so many tokens."""
        return tokens // self.compress_rate

    def index_lengths(self) -> set[int]:
        """Return how many tokens the entries stand for, with those that make no whole one yet."""
        cache, found = self._shared.held[self._index], set()
        for name, waiting in self.buffer_kv.items():
            rest = 0 if waiting is None else waiting.shape[1]
            counts = {self.entry_count[name]}
            if name == "compressor":
                counts.add(0 if cache is None else cache.seq_len(self._index))
            else:
                counts.add(self.key_count or 0)
            found |= {count * self.compress_rate + rest for count in counts}
        return found

    def check_entries(self, entries: int, tokens: int) -> None:
        """Raise `GeometryError` unless so many entries stand for so many tokens."""
        if entries != self.entries(tokens):
            raise GeometryError(
                f"the snapshot has {entries} entries for {tokens} tokens; the model makes one for "
                f"each {self.compress_rate}"
            )

    def check_parts(self, parts: Mapping[str, Tensor], tokens: int) -> None:
        """Raise `GeometryError` unless parts of a snapshot are what so many tokens leave."""
        rest, count = tokens % self.compress_rate, self.entries(tokens)
        shares = hasattr(self, "overlap_kv")  # an entry, tokens with the one before
        kinds = (_BUFFERS if rest else ()) + (_OVERLAPS if count and shares else ())
        wanted = {f"{kind}.{state}" for kind in kinds for state in range(len(self.buffer_kv))}
        wanted |= {"index_tail"} if count and "indexer" in self.buffer_kv else set()
        held = {name for name in parts if "." in name or name == "index_tail"}
        buffers, overlaps = (
            {x.shape[1] for name, x in parts.items() if name.startswith(kind)}
            for kind in (_BUFFERS, _OVERLAPS)
        )
        if held != wanted or buffers - {rest} or overlaps - {self.compress_rate}:
            raise GeometryError(
                f"with the entries of {tokens} tokens the snapshot has "
                f"{', '.join(sorted(held)) or 'nothing'}; the model holds "
                f"{', '.join(sorted(wanted)) or 'nothing'}, buffers of {rest} tokens"
            )
        super().check_parts(parts, count)

    def stand_at(self, tokens: int) -> None:
        """Count the entries that stand for so many tokens, which the layer was given."""
        self.entry_count = dict.fromkeys(self.entry_count, self.entries(tokens))

    def reset(self) -> None:
        """Forget all but the packed entries, which `SharedState` forgets."""
        super().reset()  # type: ignore[misc]
        self.forget_keys()


_BUFFERS = ("buffer_kv", "buffer_gate")
_OVERLAPS = ("overlap_kv", "overlap_gate")


@functools.cache
def entries_class(base: type) -> type:
    """Return the layer over a model's own class of layers."""
    return type(f"Compressed{base.__name__}", (EntriesLayer, base), {})
