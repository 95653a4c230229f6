"""`kvp_trellis` of ``abi.h``: the arguments of a trellis and of K's treatment."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from kvpact.formats.bitpack import WORD, planes
from kvpact.formats.form import TrellisBlock, TrellisForm
from kvpact.kernels.cpu import structs
from kvpact.quantizers import trellis
from kvpact.transforms import RandomHadamard

_CPU = torch.device("cpu")
_MOST_BLOCKS = 3
_LEARNT = {
    "weight": torch.float32,
    "first": torch.float32,
    "order": torch.int32,
    "deviation": torch.float32,
}
"""Learnt tensors of keys in the order in which kernels get them, all but one as wide as K."""


def reason(form: TrellisForm, by_token: bool) -> str:
    """Return why no kernel reads or writes these codes, of K `by_token`; empty if one does."""
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
    """A `kvp_trellis` with a codec's `state`, at an `address` that is valid while this lives."""

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

    def to_learn(self, room: Tensor) -> TrellisArguments:
        """Return the arguments of a codec that is going to learn; the kernel writes to `room`."""
        other = object.__new__(TrellisArguments)
        other._args, other._alive = structs.TrellisStruct(), [*self._alive, room]
        other.address = ctypes.addressof(other._args)
        return other

    @staticmethod
    def numbers(names: Container[str], heads: int, width: int) -> int:
        """Return how many numbers that memory is of."""
        found = sum(heads * width for name in _LEARNT if name in names and name != "deviation")
        return found + heads * _MOST_BLOCKS * ("deviation" in names)

    def _set(self, state: Mapping[str, Tensor]) -> None:
        """Copy what was learnt into one tensor, since each that lives on costs more than it has."""
        args, found = self._args, {name: state[name] for name in _LEARNT if name in state}
        if "deviation" in found:
            blocks = found["deviation"].shape[1]
            found["deviation"] = torch.nn.functional.pad(
                found["deviation"], (0, _MOST_BLOCKS - blocks)
            )
        if found:
            numbers = [x.to("cpu", _LEARNT[name]).flatten() for name, x in found.items()]
            whole = torch.cat([x.view(torch.int32) for x in numbers])
            address = whole.data_ptr()
            for name, x in zip(found, numbers, strict=True):
                setattr(args, name, address)
                address += x.nbytes
            self._alive.append(whole)
        self.address = ctypes.addressof(args)
