"""Attention over the few tokens that a mask lets through: their slots are copied side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.sources import ListSource, Pick, SegmentSource
from kvpact.kernels.views import LayerView, StreamView
from kvpact.units import TILE

MOST_QUERIES = 8
"""More queries choose so many tokens together that the mask is the quicker way."""


Copy = Callable[[SegmentSource, Pick, Tensor], None]
"""Copies the items of a pick from a source into storage of zeros for them."""


def chosen_calls(call: AttendCall, copy: Copy) -> list[AttendCall] | None:
    """Return calls over the tokens that a sparse mask lets through; None where the mask is to say.

    One for each row and, where masks differ by head and no codec has to do with several, KV head.
    The mask is to say where it lets more than half through, where a codec stores something for
    tokens together that are not all chosen, and where logits depend on positions.
    """
    config, view, mask = call.config, call.view, call.config.mask
    queries, batch = call.q.shape[2], call.q.shape[0]
    if not config.sparse or mask is None or view is None or queries > MOST_QUERIES:
        return None
    if config.sliding_window is not None or (config.is_causal and queries > 1):
        return None
    if view.k.offset is not None or view.v.offset is not None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    codecs = view.k.codec, view.v.codec
    apart = seen.shape[1] > 1 and not any(codec.joint or codec.state() for codec in codecs)
    parts = call.kv_heads if apart else 1
    several = torch.unflatten(seen, 1, (parts, -1)).flatten(2, 3)
    columns = several.any(2) if several.shape[2] > 1 else several[:, :, 0]  # that takes a while
    columns = columns.to(view.k.tail.device)
    if call.padding is not None:
        padding = call.padding.to(columns.device).view(-1, 1, 1)
        places = torch.arange(columns.shape[-1], dtype=torch.int64, device=columns.device)
        columns = columns & (places >= padding)
    calls = []
    for row in range(batch):
        for part in range(parts):
            tokens = columns[row % columns.shape[0], part].nonzero().flatten()
            heads = call.kv_heads // parts
            one = _over(call, copy, tokens, row, slice(part * heads, (part + 1) * heads))
            if one is None:
                return None
            calls.append(one)
    return calls


def _over(
    call: AttendCall, copy: Copy, tokens: Tensor, row: int, heads: slice
) -> AttendCall | None:
    """Return the call over some tokens alone, of one row and some KV heads."""
    view, config = call.view, call.config
    assert view is not None and config.mask is not None
    if not 0 < 2 * len(tokens) <= call.held + call.new:
        return None
    split = _Split.of(tokens, view.k)
    k = _stream(view.k, call.k, copy, split, row, heads)
    if (view.v.exact_from, view.v.tail.shape[2]) != (view.k.exact_from, view.k.tail.shape[2]):
        split = _Split.of(tokens, view.v)
    v = None if k is None else _stream(view.v, call.v, copy, split, row, heads)
    if k is None or v is None:
        return None
    groups = call.q.shape[1] // call.kv_heads
    own = slice(heads.start * groups, heads.stop * groups)
    mask, sinks = config.mask, config.sink_logits
    mask = mask[row % mask.shape[0] :][:1, own if mask.shape[1] > 1 else slice(None)]
    plain = mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)  # tokens are what it has
    if not plain:
        mask = mask.index_select(3, tokens.to(mask.device))
        plain = bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
    config = replace(
        config,
        mask=None if plain else mask,
        sink_logits=None if sinks is None else sinks[own],
        is_causal=False,
        padding=None,
        origin=None,
        sparse=False,
    )
    q = call.q[row : row + 1, own]
    return AttendCall(LayerView(k, v, None), None, None, q, config, None, call.latent)


class _Split(NamedTuple):
    """Ascending tokens: those that are packed, and where others are in the tail and the call."""

    packed: Tensor
    held: Tensor
    new: Tensor

    @classmethod
    def of(cls, tokens: Tensor, view: StreamView) -> _Split:
        """Split tokens as a stream does."""
        start = view.exact_from
        ends = start, start + view.tail.shape[2]
        first, second = (int(torch.searchsorted(tokens, end)) for end in ends)
        held, new = tokens[first:second] - ends[0], tokens[second:] - ends[1]
        return cls(tokens[:first], held, new)


def _stream(
    view: StreamView, new: Tensor | None, copy: Copy, split: _Split, row: int, heads: slice
) -> StreamView | None:
    """Return a stream of some tokens alone; None where their slots can't be copied."""
    begin, size, fields, packed = view.exact_from, TILE, view.codec.fields, split.packed
    count = len(packed)
    segments: tuple[dict[str, Tensor], ...] = ()
    if count:
        units = any(field.places is None for field in fields)
        if units:
            size = lcm(*(field.tokens for field in fields))
            whole = torch.unique(packed // size)
            if int(((whole + 1) * size).clamp(max=begin).sum() - (whole * size).sum()) != count:
                return None
        segment = {}
        for field in fields:
            items = packed
            if units:
                inside = torch.arange(size // field.tokens, dtype=torch.int64, device=packed.device)
                items = (whole[:, None] * len(inside) + inside).flatten()
            pick = Pick(field, row, heads, items, units)
            segment[field.name] = pick.new(view.tail.device)
            copy(view.source, pick, segment[field.name])
        segments, size = (segment,), -(-count // size) * size
    tail = view.tail[row : row + 1, heads].index_select(2, split.held)
    if new is not None and len(split.new):
        last = new[row : row + 1, heads].index_select(2, split.new)
        tail = torch.cat([tail, last.to(tail.dtype)], 2)
    source = ListSource(segments, size)
    found = view._replace(source=source, exact_from=count, tail=tail, sinks=None, sink_end=0)
    if view.sinks is None or view.sink_positions is None:
        return found
    first = packed[: view.sink_end]  # no later one is a sink token
    if not len(first) or int(first[0]) >= view.sink_end:
        return found
    slot, place = (view.sink_positions[row].to(first.device)[:, None] == first).nonzero().T
    sinks = view.sinks[row : row + 1, heads].index_select(2, slot)
    end = int(place.max()) + 1 if len(place) else 0
    return found._replace(sinks=sinks, sink_positions=place[None], sink_end=end)
