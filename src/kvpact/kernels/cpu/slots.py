"""Packed slots as compiled kernels are told of them: their format, and where they lie."""

from __future__ import annotations

from ctypes import Structure
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.formats import CodesField
from kvpact.kernels.cpu import structs, trellis
from kvpact.kernels.sources import SegmentSource
from kvpact.methods import Codec
from kvpact.transforms import IDENTITY
from kvpact.transforms.hadamard import RandomHadamard

MOST_GROUPS = 32
DTYPES = {torch.float32: structs.F32, torch.float16: structs.F16, torch.bfloat16: structs.BF16}
_FIELDS = ("codes", "scale", "zero", "fold", "shift", "base", "mean", "step")


class SlotFormat:
    """What of a stream's arguments depends on its codec alone; or why there are none.

    - `reason`: why no kernel reads the slots; empty if one does.
    - `attend_reason`: why none attends over them.
    - `stream`: the arguments, but for where slots and tokens lie.
    - `by_channel`: whether a word of codes holds consecutive tokens of a channel; whether of a
      trellis.
    - `whole`: whether the kernel for few query rows multiplies levels as whole numbers, where the
      processor can: `whole_format` in C.
    - `learnt`: whether the codec had learnt when this was made.
    """

    def __init__(self, codec: Codec) -> None:
        self.reason, self.by_channel, self.learnt = "", False, codec.ready
        self.whole = False
        self.stream = structs.StreamStruct()
        self._names: list[tuple[str, str]] = []
        self._alive: list[Tensor] = []
        self._trellis: trellis.TrellisArguments | None = None
        form = codec.packed_format()
        if form is None:
            self.reason = f"no native format for {type(codec).__name__}"
            self.attend_reason = self.reason
            return
        codes = next(field for field in codec.fields if field.name == form.codes)
        dim = codes.dim if isinstance(codes, CodesField) else codes.shape[0]
        if dim > structs.MOST_DIM:
            self.reason = f"width {dim} is above {structs.MOST_DIM}"
        elif codec.transform is not IDENTITY and not isinstance(codec.transform, RandomHadamard):
            self.reason = f"transform {type(codec.transform).__name__}"
        self.by_channel = isinstance(codes, CodesField) and codes.order == "channel"
        if form.trellis is not None:
            self.reason = self.reason or trellis.reason(form.trellis, not self.by_channel)
        channels = form.channels or dim
        self.attend_reason = self.reason
        if channels < dim and (channels % 32 or -(-dim // channels) > MOST_GROUPS):
            self.attend_reason = self.reason or f"groups of {channels} channels"
        stream = self.stream
        stream.kind, stream.bits, stream.dim = structs.KINDS[form.kind], form.bits, dim
        stream.group, stream.channels = form.group, channels
        stream.shift_scaled, stream.middle = form.shift_scaled, form.middle
        if form.trellis is not None:
            self._trellis = trellis.TrellisArguments(form.trellis, codec.state())
            stream.trellis, stream.treated = self._trellis.address, codec.transform is IDENTITY
        if form.kind == "raw":
            stream.number = DTYPES[codes.dtype]
        stream.unit = form.integer_unit
        self.whole = form.trellis is not None or (
            form.integer_unit > 0 and form.bits in (2, 3, 4, 8)
        )
        levels = [level * form.unit for level in form.levels] or [0.0]
        if form.kind == "table":
            # At least 16: a vector register of levels is filled up with repetitions.
            levels *= max(16 // len(levels), 1)
        stream.table = self._keep(torch.tensor(levels, dtype=torch.float32, device="cpu"))
        if isinstance(codec.transform, RandomHadamard):
            stream.signs = self._keep(codec.transform.signs(torch.device("cpu")))
        for name in _FIELDS:
            field = getattr(form, name)
            if field is not None:
                self._names.append((name, field))

    def after(self, codec: Codec, arguments: trellis.TrellisArguments) -> None:
        """Know the format of a codec of trellises that has learnt, from the one before."""
        other = object.__new__(SlotFormat)
        other.__dict__.update(self.__dict__)
        other.stream, other.learnt = structs.StreamStruct.from_buffer_copy(self.stream), True
        other._trellis, other.stream.trellis = arguments, arguments.address
        _formats[codec] = other

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()

    def place(self, stream: Structure, source: SegmentSource) -> bool:
        """Write down where the slots lie; False if not as kernels need them."""
        for name, field in self._names:
            found = source.where(field)
            if found is None:
                return False
            setattr(stream, name, found[3:] + found[1:3])
        return True


_formats: WeakKeyDictionary[Codec, SlotFormat] = WeakKeyDictionary()


def slot_format(codec: Codec) -> SlotFormat:
    """Return the format of a codec's slots, made once, and anew when the codec has learnt."""
    found = _formats.get(codec)
    if found is None or (not found.learnt and codec.ready):
        found = _formats[codec] = SlotFormat(codec)
    return found
