"""Queries for slots of treated keys: their products with the stored numbers are the logits.

A decoded key is its base and a linear map of the stored numbers (`TreatedKeys.decode`), so queries
take the transposed map: channels over their weights, in the order of the blocks, rotated, times the
deviations. It is one matrix for each head, made once; bases are for `trellis.bases`.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.methods import Codec
from kvpact.methods.trellis_keys import TreatedKeys
from kvpact.transforms import RandomHadamard


class Treatment(NamedTuple):
    """What queries are multiplied by.

    `matrix`: `[H, D, D]` fp32: a query from the left gives the one for stored numbers. `first`:
    `[H, D, 1]` fp32, the first key; None where it is no base.
    """

    matrix: Tensor
    first: Tensor | None


_known: WeakKeyDictionary[TreatedKeys, dict[tuple[int, torch.device], Treatment]] = (
    WeakKeyDictionary()
)


def _treatment(codec: TreatedKeys, heads: int, device: torch.device) -> Treatment:
    state = {name: x.to(device) for name, x in codec.state().items()}
    dim = sum(block.dim for block in codec.form.blocks)
    x = torch.eye(dim, dtype=torch.float32, device=device).expand(heads, dim, dim)
    if "weight" in state:
        x = x / state["weight"].to(torch.float32).view(heads, 1, dim)
    if "order" in state:
        x = x.gather(-1, state["order"].to(torch.int64).view(heads, 1, dim).expand(x.shape))
    parts = []
    for index, part in enumerate(torch.split(x, [block.dim for block in codec.form.blocks], -1)):
        block = codec.form.blocks[index]
        rotated = RandomHadamard(block.dim, block.seed).forward(part)
        if "deviation" in state:
            rotated = rotated * state["deviation"][:, index].to(torch.float32).view(heads, 1, 1)
        parts.append(rotated)
    first = state["first"].to(torch.float32).unsqueeze(-1) if "first" in state else None
    return Treatment(torch.cat(parts, -1), first)


def treatment(codec: TreatedKeys, heads: int, device: torch.device) -> Treatment:
    """Return what queries are multiplied by, made once for a codec that has learnt."""
    made, key = _known.setdefault(codec, {}), (heads, device)
    if key not in made:
        made[key] = _treatment(codec, heads, device)
    return made[key]


def packed_queries(codec: Codec, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return queries for a codec's stored numbers, and the logits of its first key.

    `rows`: `[B, H, R, D]` fp32, scaled queries. Returns `[B, H, R, D]`, and `[B, H, R]` where the
    first key is a base.
    """
    if not isinstance(codec, TreatedKeys):
        return codec.transform.forward(rows), None
    if not codec.ready:
        return rows, None  # nothing is stored yet
    matrix, first = treatment(codec, rows.shape[1], rows.device)
    return rows @ matrix, None if first is None else (rows @ first).squeeze(-1)
