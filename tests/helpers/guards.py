"""Memory that shows what is not written to it, and what is written beside it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch

_GUARD, _VALUE = 64, 85


class Guards:
    """Allocates tensors between guards, which `check` looks at."""

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []

    def new(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: float = math.nan
    ) -> torch.Tensor:
        """Return memory filled with NaN, or with `fill`."""
        whole = torch.full((math.prod(shape) + 2 * _GUARD,), _VALUE).to(dtype)
        self._whole.append(whole)
        inside = whole[_GUARD:-_GUARD].view(shape)
        inside.copy_(torch.tensor(fill))
        return inside

    def check(self) -> None:
        """Raise where something was written beside a tensor that was returned since the last."""
        found, self._whole = self._whole, []
        for whole in found:
            guards = torch.cat([whole[:_GUARD], whole[-_GUARD:]])
            assert torch.equal(guards, torch.full_like(guards, _VALUE)), "guards overwritten"


@contextmanager
def guarded_outputs(module: ModuleType) -> Iterator[Guards]:
    """Let the native kernels of a module write between guards, and look at these in the end."""
    guards = Guards()
    name = "new_output" if hasattr(module, "new_output") else "new_state"

    def new(*shape: int) -> torch.Tensor:
        return guards.new(shape)

    def new_state(count: int, dtype: torch.dtype) -> torch.Tensor:
        return guards.new((count,), dtype)

    with patch.object(module, name, new if name == "new_output" else new_state):
        yield guards
    guards.check()
