"""The tokens of a batch in one layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.integrations.pages.window import Row
from kvpact.kernels import Encoder, StreamPlan, check_arrival
from kvpact.quantizers.checks import collected, deferred, require_finite
from kvpact.snapshot.pages import sent


class Batch(NamedTuple):
    """Tokens of a batch, `[tokens, heads, D]` each, their outputs, and how they attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    config: AttendConfig

    def of(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of a row, `[1, heads, new, D]` each."""
        q, k, v = (x[row.start : row.end].transpose(0, 1).unsqueeze(0) for x in self[:3])
        return q, k, v


def places(tokens: list[int], device: torch.device) -> slice | Tensor:
    """Return an index of tokens, which makes no copy of them where they stand side by side."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return sent(torch.tensor(tokens, dtype=torch.int64, device="cpu"), device)


def prepared(side: StreamPlan, x: Tensor, good: Tensor | None) -> tuple[Encoder, Any]:
    """Do all that can refuse tokens; deferred checks write to `good`."""
    if side.codec.group > 1:
        check_arrival(side, x, 0, None)
        return side.encoder, None
    if good is None:
        return side.prepare(x)
    with deferred():
        require_finite(x, lambda: NonFiniteError("NaN or infinity"))
        side.codec.check_range(x)
        ready = side.prepare(x)
        found = collected()
    if found is not None:
        good.logical_and_(found)
    return ready
