"""Where encoding kernels find slots: tables of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import TILE
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.triton.encode.form import tables_of
from kvpact.kernels.triton.forms import addresses_of
from kvpact.methods import Codec


class EncodeSlots(NamedTuple):
    """Where the slots of a batch lie, for encoders.

    `table`, `heads`: on the device, of `SLOT_FIELDS`; as those of `forms.Places`.
    """

    table: Tensor
    heads: Tensor
    segments: int
    tiles: int

    @classmethod
    def of(
        cls, codec: Codec, sources: Sequence[SegmentSource], batch: int, device: torch.device
    ) -> EncodeSlots:
        """Return where slots lie. `sources`: one for all rows, or one for each."""
        names = tables_of(codec, device).names
        held = [
            [None if name is None else source.where(name) for name in names] for source in sources
        ]
        for where in held:
            pairs = zip(names, where, strict=True)
            if any(name is not None and lies is None for name, lies in pairs):
                raise GeometryError("the storage of slots has gaps, or segments differ in strides")
        table, heads = addresses_of(held, batch, device)
        return cls(table, heads, table.shape[2], sources[0].segment_tokens // TILE)

    def row(self, index: int) -> EncodeSlots:
        """Return where one row's slots lie."""
        table = self.table[:, index : index + 1].contiguous()
        return self._replace(table=table)
