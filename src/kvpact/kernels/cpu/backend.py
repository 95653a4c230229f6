"""The native CPU kernels as a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable
from kvpact.kernels.base import AttendCall, Operation, Precision, SlotReader
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.decode import decode
from kvpact.kernels.cpu.encode import CpuEncoder, codec_encoder
from kvpact.kernels.cpu.library import library
from kvpact.kernels.cpu.slots import DTYPES, slot_format
from kvpact.kernels.torch.attend import attend
from kvpact.methods import Codec


class CpuBackend:
    """A C++ library, at the best instruction set that the processor has."""

    name = native.NAME

    def describe(self) -> str:
        """Return the instruction set."""
        level = library().level
        return f"cpu: native, {level if level != 'none' else 'base instructions'}"

    def runs_here(self, device: torch.device) -> str:
        """Run where the library was built, on tensors of the CPU."""
        try:
            library()
        except BackendUnavailable as error:
            return str(error)
        return "" if device.type == "cpu" else f"the native kernels don't run on {device}"

    def covers(self, operation: Operation, codec: Codec, dtype: torch.dtype) -> str:
        """Cover codecs that have a `packed_format` (attend, decode) or an `encoding` (encode)."""
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        if operation == "encode":
            return codec_encoder(codec).reason
        form = slot_format(codec)
        return form.attend_reason if operation == "attend" else form.reason

    def precision(self, precision: Precision, k: Codec, v: Codec) -> tuple[Precision, str]:
        """Compute in 8-bit integers with AVX-512 VNNI, over codes of 2, 4 or 8 bits."""
        if precision == "int8" and library().level != "avx512":
            return "full", f"8-bit arithmetic needs AVX-512 VNNI, this is {library().level}"
        return precision, ""

    def attend(self, calls: Sequence[AttendCall], precision: Precision) -> Tensor:
        """Attend over all calls at once; those without tokens held go through the torch body."""
        if all(call.view is not None for call in calls):
            return native.attend_native(library(), calls, precision)
        held = [call for call in calls if call.view is not None]
        q = calls[0].q
        rows = sum(call.q.shape[0] for call in calls)
        out = native.new_output(rows, *q.shape[1:3], calls[0].output_dim).to(q.dtype)
        outputs = iter(
            torch.split(
                native.attend_native(library(), held, precision), [call.q.shape[0] for call in held]
            )
            if held
            else ()
        )
        place = 0
        for call in calls:
            after = place + call.q.shape[0]
            out[place:after] = attend(call) if call.view is None else next(outputs)
            place = after
        return out

    def encoder(self, codec: Codec) -> CpuEncoder:
        """Return an encoder."""
        return CpuEncoder(library(), codec)

    def decode(
        self, slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool
    ) -> None:
        """Decode packed tokens."""
        decode(library(), slots, start, end, out, inverse)


CPU = CpuBackend()
