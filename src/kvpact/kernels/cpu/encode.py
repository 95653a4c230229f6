"""Encoding by the native kernel: what it covers, and its arguments.

The codec's `encode` and the fields' `write` define the bytes. Everything is checked here, before
C++ is entered.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvpact.errors import GeometryError, KernelError
from kvpact.formats import CodesField, Field
from kvpact.formats.encoding import search_tree
from kvpact.kernels.base import Prepared
from kvpact.kernels.cpu import structs, trellis
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES
from kvpact.kernels.cpu.structs import CHOICES, ENCODINGS, MOST_DIM, MOST_GROUP, EncodeArgs
from kvpact.kernels.sources import SegmentSource, WritableSource
from kvpact.kernels.torch.slots import TorchEncoder
from kvpact.methods import Codec
from kvpact.transforms import IDENTITY, RandomHadamard

_NAME = "cpu encode"
_ADDRESS = ctypes.sizeof(ctypes.c_void_p)
_FIELDS = ("codes", "scale", "zero", "mean", "balance", "base", "step")


def _by_channel(field: Field) -> bool:
    return isinstance(field, CodesField) and field.order == "channel"


class CodecEncoder:
    """What of the kernel's arguments depends on the codec alone; or why there are none.

    - `codec`: whose `encode` is to be computed.
    - `reason`: why the kernel does not cover the codec; empty if it does.
    - `limit`: tokens without a larger magnitude can't fail.
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
            args.signs = self._keep(transform.signs(torch.device("cpu")))
        if form.levels:
            args.levels = self._keep(torch.tensor(form.levels, dtype=torch.float32, device="cpu"))
            tree = search_tree(form.boundaries)
            args.steps = self._keep(torch.tensor(tree, dtype=torch.float32, device="cpu"))
        if form.trellis:
            self._trellis = trellis.TrellisArguments(form.trellis, codec.state())
            args.trellis = self._trellis.address
        names = [(name, getattr(form, name)) for name in _FIELDS]
        self.fields = [(name, fields[field]) for name, field in names if field is not None]

    def after(self, codec: Codec) -> CodecEncoder:
        """Return the encoder of a codec of trellises that has learnt, from the one before."""
        other = object.__new__(CodecEncoder)
        other.__dict__.update(self.__dict__)
        other.args, other.learnt = EncodeArgs.from_buffer_copy(self.args), True
        other._trellis = self._trellis.learnt(codec.state())
        other.args.trellis = other._trellis.address
        _encoders[codec] = other
        return other

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()


_encoders: WeakKeyDictionary[Codec, CodecEncoder] = WeakKeyDictionary()


def codec_encoder(codec: Codec) -> CodecEncoder:
    """Return the encoder of a codec, made once, and anew when the codec has learnt."""
    found = _encoders.get(codec)
    if found is None or (not found.learnt and codec.ready):
        found = _encoders[codec] = CodecEncoder(codec)
    return found


def exact_tokens(x: Tensor) -> tuple[ctypes.Structure, Tensor]:
    """Return where tokens `[B, H, T, D]` lie, and what keeps them there: a copy if D has gaps."""
    row, head, token, channel = x.stride()
    if channel != 1 and x.shape[3] != 1:
        x = x.contiguous()
        row, head, token, _ = x.stride()
    size = x.element_size()
    return structs.ExactStruct(x.data_ptr(), row * size, head * size, token * size), x


def magnitudes(library: NativeLibrary, tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude in each `[B, H, T, D]`; NaN or infinity where one number is."""
    found, bit, call = [], library.bit, library.magnitude
    for x in tensors:
        exact, x = exact_tokens(x)
        found.append(call(bit, ctypes.byref(exact), DTYPES[x.dtype], *x.shape))
    return found


def placed(codec: Codec, encoder: CodecEncoder, source: SegmentSource) -> ctypes.Structure:
    """Return the arguments with where the fields of a source lie; found out once."""
    known = source.prepared.get(_NAME)
    if known is None or known[0] is not codec:
        args, places = EncodeArgs.from_buffer_copy(encoder.args), []
        for name, field in encoder.fields:
            where = source.where(field.name)
            if where is None:
                raise GeometryError(f"storage of {field.name} has gaps")
            setattr(args, name, where[3:] + where[1:3])
            places.append(where)  # kept alive: the kernel reads their arrays
        known = source.prepared[_NAME] = codec, args, places
    found: ctypes.Structure = known[1]
    return found


class CpuEncoder:
    """Encodes tokens natively.

    `codec`: whose slots they are; `codec_encoder(codec).reason` is empty.
    """

    def __init__(self, library: NativeLibrary, codec: Codec) -> None:
        self._library, self._codec = library, codec
        self._torch = TorchEncoder(codec)
        self._known = ref(codec_encoder(codec))  # the codec has it, and what it learnt

    def prepare(self, x: Tensor, size: float | None = None) -> Prepared:
        """Return the tokens, which can't fail any more; or the torch body's arrays.

        Where a magnitude might be beyond the format, the torch body decides, and names it; it also
        encodes what a codec learns from.
        """
        form = self._form()
        if not form.learnt:
            return self._torch.prepare(x)
        limit = form.limit
        if limit == math.inf or (size is not None and size <= limit):
            return x
        if magnitudes(self._library, (x,))[0] <= limit:
            return x
        return self._torch.prepare(x)

    def _form(self) -> CodecEncoder:
        found = self._known()
        if found is None or not found.learnt:
            found = codec_encoder(self._codec)
            self._known = ref(found)
        return found

    def write(self, prepared: Prepared, source: WritableSource, start: int) -> None:
        """Encode tokens into segments.

        Raises `KernelError` where the kernel refused its arguments; the slots are as they were.
        """
        if isinstance(prepared, dict):
            self._torch.write(prepared, source, start)
            return
        form, segment_tokens = self._form(), source.segment_tokens
        args = EncodeArgs.from_buffer_copy(placed(self._codec, form, source))
        for name, _ in form.fields:  # the kernel counts from where it begins
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
