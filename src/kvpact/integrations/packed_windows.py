"""Bytes of windows that are packed, counted from formats and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch

from kvpact.cache.stats import stream_facts
from kvpact.errors import SpecError
from kvpact.spec import Spec, parse_spec
from kvpact.units import TILE, out_of_window, segment_tokens

_KIND = "sliding_attention"


def with_packed_windows(shapes: Sequence[Any], sliding: str | Spec) -> list[Any]:
    """Return shapes (`LayerShape`) whose windows are packed by a spec. Raises `SpecError`."""
    text = str(parse_spec(sliding).with_options(sinks=0))
    if not any(shape.kind == _KIND for shape in shapes):
        raise SpecError("no layer of this model has sliding attention alone: leave sliding out")
    return [x._replace(sliding=text) if x.kind == _KIND else x for x in shapes]


def window_bytes(shape: Any, tokens: int, batch: int, itemsize: int) -> int:
    """Return the bytes of the packed window of a `LayerShape` after so many tokens in one call."""
    dtype = torch.float32 if itemsize == 4 else torch.float16
    facts = stream_facts(parse_spec(shape.sliding), shape.geometry(dtype))
    kept, least = shape.limit, lcm(TILE, *(x.group for x in facts))
    packed = [out_of_window(x.group, x.window, tokens) for x in facts]
    ready = all(n >= x.learns_from for x, n in zip(facts, packed, strict=True))
    first = max(min([tokens - kept, *packed]), 0) if ready else 0
    sizes = [segment_tokens(x.group, n - first + least) for x, n in zip(facts, packed, strict=True)]
    held = tokens - first // lcm(*sizes) * lcm(*sizes)
    return sum(sum(x.held(held, batch, shape.heads, itemsize).values()) for x in facts)
