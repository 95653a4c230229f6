"""Encoding: the bytes that every backend has to give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.kernels.sources import Segment
from kvpact.methods import Arrays, Codec


class TorchEncoder:
    """Encodes with the codec's own `encode`; its fields write the arrays."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def prepare(
        self, x: Tensor, size: float | None = None, frozen: Arrays | None = None
    ) -> dict[str, Tensor]:
        """Return the encoded arrays of `[B, H, T, D]` (see `Codec.encode`)."""
        return self._codec.encode(x.to(torch.float32), frozen)

    def write(
        self,
        prepared: dict[str, Tensor],
        segments: Sequence[Segment],
        segment_tokens: int,
        start: int,
    ) -> None:
        """Write arrays into segments."""
        for field in self._codec.fields:
            if field.name not in prepared:
                continue
            values, done = prepared[field.name], 0
            unit = field.tokens if field.per_group else 1
            while done < values.shape[2]:
                index, inside = divmod(start + done * unit, segment_tokens)
                take = min((segment_tokens - inside) // unit, values.shape[2] - done)
                part = values[:, :, done : done + take]
                field.write(segments[index][field.name], inside, part)
                done += take
