"""`kvp_trellis` of ``abi.h``: what kernels are told of a trellis and of K's treatment."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from kvpact.formats.bitpack import WORD, planes
from kvpact.formats.trellis import TrellisBlock, TrellisForm
from kvpact.kernels.cpu import structs
from kvpact.quantizers import trellis
from kvpact.transforms import RandomHadamard

_CPU = torch.device("cpu")
_MOST_BLOCKS = 3


def reason(form: TrellisForm, by_token: bool) -> str:
    """Return why no kernel reads or writes these codes; empty if one does.

    `by_token`: whether a word holds codes of one token (K).
    """
    for block in form.blocks:
        if block.dim < trellis.LEAST:
            return f"trellises of {block.dim} channels"
        bits = block.bits
        width = planes(bits)[0] if bits > 1 else form.interleave
        if by_token and bits and block.dim * width % WORD:
            return f"trellises of {block.dim} channels, whose codes of {bits} bits fill no words"
    return ""


@lru_cache(maxsize=64)
def block_arguments(block: TrellisBlock) -> tuple[ctypes.Structure, list[Tensor]]:
    """Return a `kvp_block`, which depends on no codec, and the tensors that it points to."""
    made = structs.Block(block.dim, block.bits, block.states.bit_length() - 1)
    tensors = [RandomHadamard(block.dim, block.seed).signs(_CPU)]
    if block.bits:
        made.unit = trellis.UNITS[block.bits]
        tensors += [trellis.levels(block.bits, _CPU), trellis.cells(block.bits)]
        made.levels, made.cells = (tensor.data_ptr() for tensor in tensors[1:])
    made.signs = tensors[0].data_ptr()
    return made, tensors


class TrellisArguments:
    """A `kvp_trellis`, and the memory that it points to.

    `state`: what the codec has learnt; empty where nothing. `address`: of the structure; valid
    while this lives.
    """

    def __init__(self, form: TrellisForm, state: Mapping[str, Tensor]) -> None:
        assert len(form.blocks) <= _MOST_BLOCKS
        self._alive: list[Tensor] = []
        self._args = args = structs.TrellisStruct(
            len(form.blocks), form.interleave, center=form.center
        )
        for index, block in enumerate(form.blocks):
            made, tensors = block_arguments(block)
            args.block[index] = made
            self._alive += tensors
        self._set(state)

    def learnt(self, state: Mapping[str, Tensor]) -> TrellisArguments:
        """Return the arguments of a codec that has learnt, from those before."""
        other = object.__new__(TrellisArguments)
        other._args, other._alive = (
            structs.TrellisStruct.from_buffer_copy(self._args),
            [*self._alive],
        )
        other._set(state)
        return other

    def _set(self, state: Mapping[str, Tensor]) -> None:
        args = self._args
        for name in ("weight", "first"):
            if name in state:
                setattr(args, name, self._keep(state[name], torch.float32))
        if "order" in state:
            args.order = self._keep(state["order"], torch.int32)
            blocks = state["deviation"].shape[1]
            deviation = torch.nn.functional.pad(state["deviation"], (0, _MOST_BLOCKS - blocks))
            args.deviation = self._keep(deviation, torch.float32)
        self.address = ctypes.addressof(args)

    def _keep(self, tensor: Tensor, dtype: torch.dtype) -> int:
        self._alive.append(tensor.to("cpu", dtype).contiguous())
        return self._alive[-1].data_ptr()
