"""Encoding by the native kernel: what it covers, and its arguments.

The codec's `encode` and the fields' `write` define the bytes. Everything is checked here, before
C++ is entered.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import GeometryError, KernelError
from kvpact.formats import CodesField, Field
from kvpact.formats.encoding import search_tree
from kvpact.kernels.cpu import structs, trellis
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES
from kvpact.kernels.cpu.structs import CHOICES, ENCODINGS, MOST_DIM, MOST_GROUP, EncodeArgs
from kvpact.kernels.sources import PlacedSegments, Segment, SegmentSource, Where
from kvpact.kernels.torch.encode import TorchEncoder
from kvpact.methods import Codec
from kvpact.transforms import IDENTITY, RandomHadamard

_NAME = "cpu encode"
_ADDRESS = ctypes.sizeof(ctypes.c_void_p)
_FIELDS = ("codes", "scale", "zero", "mean", "balance", "base", "step")


def _by_channel(field: Field) -> bool:
    return isinstance(field, CodesField) and field.order == "channel"


class CodecEncoder:
    """What of the kernel's arguments depends on the codec alone; or why there are none.

    Parameters
    ----------
    codec : Codec
        Whose `encode` is to be computed.

    Attributes
    ----------
    reason : str
        Why the kernel does not cover the codec; empty if it does.
    limit : float
        Tokens without a larger magnitude can't fail.
    """

    def __init__(self, codec: Codec) -> None:
        self.reason, self.limit, self.args, self.learnt = "", 0.0, EncodeArgs(), codec.ready
        self._alive: list[Tensor] = []
        form, transform = codec.encoding(), codec.transform
        if form is None:
            self.reason = f"no native encoding for {type(codec).__name__}"
            return
        fields: dict[str, Field] = {field.name: field for field in codec.fields}
        codes = fields[form.codes]
        dim = codes.dim if isinstance(codes, CodesField) else codes.shape[0]
        if dim > MOST_DIM:
            self.reason = f"width {dim} is above {MOST_DIM}"
        elif transform is not IDENTITY and not isinstance(transform, RandomHadamard):
            self.reason = f"transform {type(transform).__name__}"
        elif form.group > 1 and MOST_GROUP % form.group:
            self.reason = f"groups of {form.group} tokens"
        elif form.trellis:
            self.reason = trellis.reason(form.trellis, not _by_channel(codes))
        self.limit, self.args = form.limit, EncodeArgs()
        args = self.args
        args.kind, args.bits, args.dim = ENCODINGS[form.kind], form.bits, dim
        args.by_channel = _by_channel(codes)
        args.choice, args.group = CHOICES[form.choice], form.group
        args.channels = form.channels or dim
        if isinstance(transform, RandomHadamard):
            args.signs = self._keep(trellis.signs(transform))
        if form.levels:
            args.levels = self._keep(torch.tensor(form.levels, dtype=torch.float32, device="cpu"))
            tree = search_tree(form.boundaries)
            args.steps = self._keep(torch.tensor(tree, dtype=torch.float32, device="cpu"))
        if form.trellis:
            self._trellis = trellis.TrellisArguments(form.trellis, codec.state())
            args.trellis = self._trellis.address
        names = [(name, getattr(form, name)) for name in _FIELDS]
        self.fields = [(name, fields[field]) for name, field in names if field is not None]

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()


_encoders: WeakKeyDictionary[Codec, CodecEncoder] = WeakKeyDictionary()


def codec_encoder(codec: Codec) -> CodecEncoder:
    """Return the encoder of a codec, made once, and anew when the codec has learnt."""
    found = _encoders.get(codec)
    if found is None or (codec.ready and not found.learnt):
        found = _encoders[codec] = CodecEncoder(codec)
    return found


def exact_tokens(x: Tensor) -> tuple[structs.Exact, Tensor]:
    """Return where tokens `[B, H, T, D]` lie, and what keeps them there: a copy if D has gaps."""
    row, head, token, channel = x.stride()
    if channel != 1 and x.shape[3] != 1:
        x = x.contiguous()
        row, head, token, _ = x.stride()
    size = x.element_size()
    return structs.Exact(x.data_ptr(), row * size, head * size, token * size), x


def magnitude(library: NativeLibrary, x: Tensor) -> float:
    """Return the largest magnitude in `[B, H, T, D]`; NaN or infinity where one number is."""
    exact, x = exact_tokens(x)
    found: float = library.magnitude(library.bit, ctypes.byref(exact), DTYPES[x.dtype], *x.shape)
    return found


def _args(codec: Codec, places: Sequence[Where | None]) -> EncodeArgs:
    """Return the arguments with where the fields lie."""
    encoder = codec_encoder(codec)
    args = EncodeArgs.from_buffer_copy(encoder.args)
    for (name, field), where in zip(encoder.fields, places, strict=True):
        if where is None:
            raise GeometryError(f"storage of {field.name} has gaps")
        setattr(args, name, where[3:] + where[1:3])
    return args


def placed(codec: Codec, source: SegmentSource) -> tuple[list[Where | None], EncodeArgs]:
    """Return where the fields of a source lie, and the arguments that say so; found out once."""
    known = source.prepared.get(_NAME)
    if known is None or known[0] is not codec:
        places = [source.where(field.name) for _, field in codec_encoder(codec).fields]
        known = source.prepared[_NAME] = codec, places, _args(codec, places)
    return known[1], known[2]


class CpuEncoder:
    """Encodes tokens natively.

    Parameters
    ----------
    library : NativeLibrary
        Encodes.
    codec : Codec
        Whose slots they are; `codec_encoder(codec).reason` is empty.
    """

    def __init__(self, library: NativeLibrary, codec: Codec) -> None:
        self._library, self._codec = library, codec
        self._torch = TorchEncoder(codec)

    def prepare(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the tokens, which can't fail any more; or the torch body's arrays.

        Where a magnitude might be beyond the format, the torch body decides, and names it; it also
        encodes what a codec learns from.
        """
        if not self._codec.ready:
            return self._torch.prepare(x)
        limit = codec_encoder(self._codec).limit
        if limit == math.inf or magnitude(self._library, x) <= limit:
            return x
        return self._torch.prepare(x)

    def write(
        self,
        prepared: Tensor | dict[str, Tensor],
        segments: Sequence[Segment],
        segment_tokens: int,
        start: int,
    ) -> None:
        """Encode tokens into segments.

        Raises
        ------
        KernelError
            The kernel refused its arguments; the slots are as they were.
        GeometryError
            The slots have gaps in memory.
        """
        if isinstance(prepared, dict):
            self._torch.write(prepared, segments, segment_tokens, start)
            return
        places: list[Where | None]  # kept alive: the kernel reads their arrays
        if isinstance(segments, PlacedSegments):
            places, args = placed(self._codec, segments.source)
        else:
            places = [_where(segments, f.name) for _, f in codec_encoder(self._codec).fields]
            args = _args(self._codec, places)
        args = EncodeArgs.from_buffer_copy(args)
        for name, _ in codec_encoder(self._codec).fields:  # the kernel counts from where it begins
            getattr(args, name).base += start // segment_tokens * _ADDRESS
        args.x, x = exact_tokens(prepared)
        args.dtype = DTYPES[x.dtype]
        args.batch, args.heads, args.tokens, _ = x.shape
        args.start, args.segment_tokens = start, segment_tokens
        args.threads = torch.get_num_threads()
        status = self._library.encode(self._library.bit, ctypes.byref(args), 1)
        if status:
            raise KernelError(
                f"the native encoder refused its arguments (status {status}); nothing was stored. "
                "This is a defect of kvpact: report it, and use backend='torch' until then"
            )


def _where(segments: Sequence[Segment], name: str) -> Where | None:
    tensors = [segment[name] for segment in segments]
    strides, size = tensors[0].stride(), tensors[0].element_size()
    if any(tensor.stride() != strides or not tensor[0, 0].is_contiguous() for tensor in tensors):
        return None
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    return Where.of(addresses, strides[0] * size, strides[1] * size)
