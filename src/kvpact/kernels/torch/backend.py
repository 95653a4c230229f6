"""The torch bodies as a backend: on every device, for every codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall, Backend, Operation, SlotReader
from kvpact.kernels.torch.attend import attend
from kvpact.kernels.torch.slots import TorchEncoder, decode_slots
from kvpact.methods import Codec


class TorchBackend(Backend):
    """Defines the results of all operations."""

    name = "torch"
    kind = ""

    def describe(self) -> str:
        """Return what it is."""
        return "torch: plain operations on every device, which define the results"

    def runs_here(self, device: torch.device) -> str:
        """Run everywhere."""
        return ""

    def covers(self, operation: Operation, codec: Codec, dtype: torch.dtype) -> str:
        """Cover everything."""
        return ""

    def attend(self, calls: Sequence[AttendCall]) -> Tensor:
        """Attend, one call after the other."""
        outputs = [attend(call) for call in calls]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def encoder(self, codec: Codec) -> TorchEncoder:
        """Return an encoder."""
        return TorchEncoder(codec)

    def decode(
        self, slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool
    ) -> None:
        """Decode packed tokens."""
        decode_slots(slots, start, end, out, inverse=inverse)


TORCH = TorchBackend()
