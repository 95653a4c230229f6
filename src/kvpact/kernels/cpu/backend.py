"""The native CPU kernels as a backend."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable, KernelError
from kvpact.kernels.base import (
    AttendCall,
    Backend,
    Encoder,
    Operation,
    SlotReader,
    check_out,
)
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.encode import CodecEncoder, CpuEncoder
from kvpact.kernels.cpu.index import gather
from kvpact.kernels.cpu.library import library
from kvpact.kernels.cpu.prompt import CpuPrompt, learn, reason
from kvpact.kernels.cpu.prompt import covers as covers_prompt
from kvpact.kernels.cpu.slots import DTYPES, SlotFormat
from kvpact.kernels.cpu.step import CpuStep, covers
from kvpact.kernels.cpu.structs import MOST_DIM, DecodeArgs
from kvpact.kernels.prompt import PromptSide
from kvpact.kernels.sources import Pick, SegmentSource
from kvpact.kernels.torch.slots import TorchEncoder, copies
from kvpact.methods import Codec
from kvpact.methods.context import Context


class CpuBackend(Backend):
    """A C++ library, at the best instruction set that the processor has."""

    name = native.NAME
    kind = "cpu"

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
        """Cover forms that kernels decode or encode, copies by torch, and learning of `trellis`."""
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        if operation == "encode":
            return "" if copies(codec) else CodecEncoder.of(codec).reason
        if operation == "learn":
            return reason(codec)
        form = SlotFormat.of(codec)
        return form.attend_reason if operation == "attend" else form.reason

    def covers_new(self, dim: int, dtype: torch.dtype) -> str:
        """Cover new tokens without a past up to `MOST_DIM` channels."""
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        return f"width {dim} is above {MOST_DIM}" if dim > MOST_DIM else ""

    def attend(self, calls: Sequence[AttendCall]) -> Tensor:
        """Attend over all calls at once."""
        return native.attend_native(library(), calls)

    def copy_slots(self, source: SegmentSource, pick: Pick, out: Tensor) -> None:
        """Copy slots natively."""
        gather(source, pick, out)

    def step(self, call: AttendCall, good: Tensor | None = None) -> CpuStep | None:
        """Return a runner of steps like a call, each in one native call."""
        return CpuStep(library(), call) if covers(call) else None

    def prompt(
        self,
        codecs: tuple[Codec, Codec],
        sides: tuple[PromptSide, PromptSide],
        q: Tensor | None,
        seen: tuple[int, int],
    ) -> CpuPrompt | None:
        """Return a runner that stores first tokens in one native call."""
        known = covers_prompt(codecs, sides, q)
        return CpuPrompt(library(), codecs, sides, q, seen) if known else None

    def encoder(self, codec: Codec) -> Encoder:
        """Return an encoder."""
        return TorchEncoder(codec) if copies(codec) else CpuEncoder(library(), codec)

    def learn(self, codec: Codec, x: Tensor, context: Context) -> Codec:
        """Return a codec that learnt."""
        return learn(library(), codec, x, context)

    def decode(
        self, slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool
    ) -> None:
        """Decode packed tokens: the torch body's numbers, to the bit."""
        form = SlotFormat.of(slots.codec)
        check_out(out, start, end, form.dim)
        args = DecodeArgs(slots=form.args)
        args.slots.segment_tokens = slots.source.segment_tokens
        form.place(args.slots, slots.source)
        if not inverse:
            args.slots.signs = None
        args.by_channel, args.dtype = form.by_channel, DTYPES[out.dtype]
        args.batch, args.heads = out.shape[:2]
        args.first, args.last = start, end
        size = out.element_size()
        args.row, args.head, args.token = (stride * size for stride in out.stride()[:3])
        args.out, args.threads = out.data_ptr(), torch.get_num_threads()
        kernels = library()
        status = kernels.decode(kernels.bit, ctypes.byref(args))
        if status:
            raise KernelError(f"the native decoder refused its arguments ({status})")


CPU = CpuBackend()
