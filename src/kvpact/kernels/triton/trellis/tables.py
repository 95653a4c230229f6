"""What kernels that treat keys of `trellis` read of a codec: tables on its device."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.formats.trellis import TrellisForm
from kvpact.methods import Codec
from kvpact.quantizers import trellis
from kvpact.transforms import RandomHadamard
from kvpact.transforms.hadamard import random_signs


class KeyTables(NamedTuple):
    """Tables of a codec, by KV head; what was not learnt changes nothing.

    - `signs`: fp32, of the rotations of all blocks, one behind the other.
    - `order`: `[H, D]` int32: the channel at each place of the blocks.
    - `weight`, `first`: `[H, D]` fp32, by channel.
    - `deviation`: `[H, blocks]` fp32.
    - `cells`: `[blocks that have bits, 2, 2 * CELLS + 1]` int32 (`quantizers.trellis.cells`).
    """

    signs: Tensor
    order: Tensor
    weight: Tensor
    first: Tensor
    deviation: Tensor
    cells: Tensor


def _tables(form: TrellisForm, state: dict[str, Tensor], heads: int) -> KeyTables:
    dim, count = sum(block.dim for block in form.blocks), len(form.blocks)
    cpu = torch.device("cpu")
    rotations = [RandomHadamard(block.dim, block.seed) for block in form.blocks]
    signs = [random_signs(each.dim + each.block, each.seed, cpu) for each in rotations]
    plain = {
        "order": torch.arange(dim, dtype=torch.int64, device="cpu").expand(heads, dim),
        "weight": torch.ones(heads, dim, dtype=torch.float32, device="cpu"),
        "first": torch.zeros(heads, dim, dtype=torch.float32, device="cpu"),
        "deviation": torch.ones(heads, count, dtype=torch.float32, device="cpu"),
    }
    learnt = {name: x.to("cpu", torch.float32) for name, x in state.items()}
    held = {name: x.contiguous() for name, x in {**plain, **learnt}.items()}
    cells = [trellis.cells(block.bits) for block in form.blocks if block.bits]
    order = held.pop("order").to(torch.int32)
    return KeyTables(torch.cat(signs), order, **held, cells=torch.stack(cells))


_known: WeakKeyDictionary[Codec, dict[tuple[bool, int, torch.device], KeyTables]] = (
    WeakKeyDictionary()
)


def key_tables(codec: Codec, form: TrellisForm, heads: int, device: torch.device) -> KeyTables:
    """Return the tables of a codec, made once, and anew when it has learnt."""
    made, key = _known.setdefault(codec, {}), (codec.ready, heads, device)
    if key not in made:
        tables = _tables(form, codec.state(), heads)
        made[key] = KeyTables(*(table.to(device) for table in tables))
    return made[key]
