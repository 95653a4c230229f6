"""Encoding by the native kernel, as the codec's `encode` and the fields' `write` define it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.base import Prepared
from kvpact.kernels.cpu import structs
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, CodecArguments, exact_tokens
from kvpact.kernels.cpu.structs import CHOICES, ENCODERS, MOST_GROUP, EncodeArgs
from kvpact.kernels.sources import SegmentSource, WritableSource
from kvpact.kernels.torch.slots import TorchEncoder
from kvpact.methods import Codec

_NAME = "cpu encode"
_ADDRESS = ctypes.sizeof(ctypes.c_void_p)


class CodecEncoder(CodecArguments):
    """A `kvp_encode_args`; tokens without a larger magnitude than `limit` can't fail."""

    made: ClassVar[WeakKeyDictionary[Codec, Any]] = WeakKeyDictionary()
    what = "encoding"
    limit = 0.0

    def __init__(self, codec: Codec) -> None:
        form, args = codec.form, EncodeArgs()
        named = {{"mean_step": "step"}.get(field.name, field.name): field for field in codec.fields}
        super().__init__(codec, "" if form is None else form.encoder, named, args)
        if form is None or not form.encoder:
            return
        args.group = form.group
        if form.group > 1 and MOST_GROUP % form.group:
            self.reason = self.reason or f"groups of {form.group} tokens"
        self.limit = form.limit
        args.kind = ENCODERS[form.encoder]
        args.choice = CHOICES.get(form.levels.number or form.rule, 0)
        args.by_channel = self.by_channel
        if form.encoder == "codebook":
            points = form.points
            args.levels = self._keep(points)
            tree = search_tree(((points[1:] + points[:-1]) / 2).tolist())
            args.steps = self._keep(torch.tensor(tree, dtype=torch.float32, device="cpu"))


def search_tree(boundaries: Sequence[float]) -> list[float]:
    """Return `2**n - 1` ascending boundaries as a search tree: root at 1, ends of i at 2i, 2i+1."""
    count = len(boundaries) + 1
    tree, width = [0.0] * count, count
    for first in (1 << depth for depth in range(count.bit_length() - 1)):
        for i in range(first):
            tree[first + i] = boundaries[i * width + width // 2 - 1]
        width //= 2
    return tree


def magnitudes(
    library: NativeLibrary, tensors: Sequence[Tensor], exact: Sequence[tuple[int, ...]] = ()
) -> list[float]:
    """Return the largest magnitude in each `[B, H, T, D]`; NaN or infinity where one number is.

    `exact`: where they lie (see `exact_tokens`), if that is known.
    """
    alive, out = list[Tensor](), (ctypes.c_float * len(tensors))()
    known = exact or [exact_tokens(x, alive) for x in tensors]
    given = [
        structs.TENSOR.pack(*at, DTYPES[x.dtype], *x.shape)
        for x, at in zip(tensors, known, strict=True)
    ]
    library.magnitudes(library.bit, b"".join(given), len(given), torch.get_num_threads(), out)
    return list(out)


def placed(codec: Codec, encoder: CodecEncoder, source: SegmentSource) -> ctypes.Structure:
    """Return the arguments with where the fields of a source lie; found out once."""
    known = source.prepared.get(_NAME)
    if known is None or known[0] is not codec:
        args = EncodeArgs.from_buffer_copy(encoder.args)
        known = source.prepared[_NAME] = codec, args, encoder.place(args, source)
    found: ctypes.Structure = known[1]
    return found


class CpuEncoder:
    """Encodes tokens natively, of a codec with no `CodecEncoder.reason`."""

    def __init__(self, library: NativeLibrary, codec: Codec) -> None:
        self._library, self._codec = library, codec
        self._known: ref[CodecEncoder] | None = None  # the codec has it, and what it learnt

    def prepare(self, x: Tensor, size: float | None = None) -> Prepared:
        """Return the tokens, which can't fail any more; or torch's arrays where they might."""
        form = self._form()
        if not form.learnt:
            return TorchEncoder(self._codec).prepare(x)
        limit = form.limit
        if limit == math.inf or (size is not None and size <= limit):
            return x
        if magnitudes(self._library, (x,))[0] <= limit:
            return x
        return TorchEncoder(self._codec).prepare(x)

    def _form(self) -> CodecEncoder:
        found = None if self._known is None else self._known()
        if found is None or not found.learnt:
            found = CodecEncoder.of(self._codec)
            self._known = ref(found)
        return found

    def write(self, prepared: Prepared, source: WritableSource, start: int) -> None:
        """Encode tokens into segments. Raises `KernelError`; the slots are as they were."""
        if isinstance(prepared, dict):
            TorchEncoder(self._codec).write(prepared, source, start)
            return
        # `prepare` has just found out that this has learnt.
        form = (None if self._known is None else self._known()) or self._form()
        segment_tokens = source.segment_tokens
        args = EncodeArgs.from_buffer_copy(placed(self._codec, form, source))
        for name in form.fields:  # the kernel counts from where it begins
            getattr(args, name).base += start // segment_tokens * _ADDRESS
        alive: list[Tensor] = []
        args.x = exact_tokens(prepared, alive)
        args.dtype = DTYPES[prepared.dtype]
        args.batch, args.heads, args.tokens, _ = prepared.shape
        args.start, args.segment_tokens = start, segment_tokens
        args.threads = torch.get_num_threads()
        status = self._library.encode(self._library.bit, ctypes.byref(args), 1)
        if status:
            raise KernelError(
                f"the native encoder refused its arguments (status {status}); nothing was stored. "
                "This is a defect of kvpact: report it, and use backend='torch' until then"
            )
