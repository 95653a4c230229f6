"""Queries for slots of treated keys: their products with the stored numbers are the logits.

A decoded key is its base and a linear map of the stored numbers (`TreatedKeys.decode`), so queries
take the transposed map: channels over their weights, in the order of the blocks, rotated, times the
deviations. It is one matrix for each head, made once; bases are for `trellis.bases`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.of_codec import once_for_codec
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TreatedKeys
from kvpact.quantizers import trellis
from kvpact.transforms import RandomHadamard


class KeyTables(NamedTuple):
    """Tables of a codec, by KV head; entries that were not learnt are neutral."""

    signs: Tensor  # fp32, of the rotations of all blocks, one after the other
    order: Tensor  # `[H, D]` int32: the channel at each place of the blocks
    weight: Tensor  # `[H, D]` fp32, by channel
    first: Tensor  # likewise
    deviation: Tensor  # `[H, blocks]` fp32
    cells: Tensor  # `[blocks that have bits, 2, 2 * CELLS + 1]` int32, `quantizers.trellis.cells`


@once_for_codec
def key_tables(codec: Codec, heads: int, device: torch.device) -> KeyTables:
    """Return the tables of a codec with a trellis."""
    assert codec.form is not None and codec.form.trellis is not None
    form = codec.form.trellis
    dim, count = sum(block.dim for block in form.blocks), len(form.blocks)
    cpu = torch.device("cpu")
    rotations = [RandomHadamard(block.dim, block.seed) for block in form.blocks]
    signs = [each.signs(cpu) for each in rotations]
    plain = {
        "order": torch.arange(dim, dtype=torch.int64, device="cpu").expand(heads, dim),
        "weight": torch.ones(heads, dim, dtype=torch.float32, device="cpu"),
        "first": torch.zeros(heads, dim, dtype=torch.float32, device="cpu"),
        "deviation": torch.ones(heads, count, dtype=torch.float32, device="cpu"),
    }
    learnt = {name: x.to("cpu", torch.float32) for name, x in codec.state().items()}
    held = {name: x.contiguous() for name, x in {**plain, **learnt}.items()}
    cells = [trellis.cells(block.bits) for block in form.blocks if block.bits]
    order = held.pop("order").to(torch.int32)
    tables = KeyTables(torch.cat(signs), order, **held, cells=torch.stack(cells))
    return KeyTables(*(table.to(device) for table in tables))


class Treatment(NamedTuple):
    """The factors on queries."""

    matrix: Tensor  # `[H, D, D]` fp32: a query from the left gives the one for stored numbers
    first: Tensor | None  # `[H, D, 1]` fp32, the first key; None where it is no base


@once_for_codec
def treatment(codec: TreatedKeys, heads: int, device: torch.device) -> Treatment:
    """Return the factors of queries, of a codec that has learnt."""
    state = {name: x.to(device) for name, x in codec.state().items()}
    dim = sum(block.dim for block in codec.trellis.blocks)
    x = torch.eye(dim, dtype=torch.float32, device=device).expand(heads, dim, dim)
    if "weight" in state:
        x = x / state["weight"].to(torch.float32).view(heads, 1, dim)
    if "order" in state:
        x = x.gather(-1, state["order"].to(torch.int64).view(heads, 1, dim).expand(x.shape))
    parts = []
    for index, part in enumerate(torch.split(x, [block.dim for block in codec.trellis.blocks], -1)):
        block = codec.trellis.blocks[index]
        rotated = RandomHadamard(block.dim, block.seed).forward(part)
        if "deviation" in state:
            rotated = rotated * state["deviation"][:, index].to(torch.float32).view(heads, 1, 1)
        parts.append(rotated)
    first = state["first"].to(torch.float32).unsqueeze(-1) if "first" in state else None
    return Treatment(torch.cat(parts, -1), first)


def packed_queries(codec: Codec, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scaled queries `[B, H, R, D]` for stored numbers, logits of a first key or None."""
    if not isinstance(codec, TreatedKeys):
        return codec.transform.forward(rows), None
    if not codec.ready:
        return rows, None  # nothing is stored yet
    matrix, first = treatment(codec, rows.shape[1], rows.device)
    return rows @ matrix, None if first is None else (rows @ first).squeeze(-1)
