"""Packed slots as arguments of compiled kernels: their format, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import Field
from kvpact.kernels.cpu import structs, trellis
from kvpact.kernels.sources import SegmentSource, Where
from kvpact.methods import Codec
from kvpact.transforms import IDENTITY, RandomHadamard

MOST_GROUPS = 32
DTYPES = {torch.float32: structs.F32, torch.float16: structs.F16, torch.bfloat16: structs.BF16}


def exact_tokens(x: Tensor, alive: list[Tensor]) -> tuple[int, int, int, int]:
    """Return a `kvp_exact` of tokens, or of a copy (in `alive`) where channels have gaps."""
    row, head, token, channel = x.stride()
    if channel != 1 and x.shape[3] != 1:
        x = x.contiguous()
        alive.append(x)
        row, head, token, _ = x.stride()
    size = x.itemsize
    return x.data_ptr(), row * size, head * size, token * size


class CodecArguments:
    """The arguments `args` of a kernel that depend on a codec alone; or the `reason` for none.

    - `by_channel`: whether a word of codes holds consecutive tokens of a channel.
    - `learnt`: whether the codec had learnt when this was made.
    """

    made: ClassVar[WeakKeyDictionary[Codec, Any]]
    what: ClassVar[str]

    def __init__(self, codec: Codec, kind: str, fields: Mapping[str, Field], args: Any) -> None:
        """`kind`: what kernels do; "" for nothing. `fields`: as the arguments name them."""
        self.args, self.reason, self.learnt = args, "", codec.ready
        self._alive: list[Tensor] = []
        form, self.fields = codec.form, fields
        if form is None or not kind:
            self.reason = f"no native {self.what} for {type(codec).__name__}"
            return
        self.dim, self.by_channel = form.dim, form.in_words and form.order == "channel"
        args.bits, args.dim, args.channels = form.bits, form.dim, form.channels
        if form.trellis is not None:
            self.reason = trellis.reason(form.trellis, not self.by_channel)
            self.trellis = trellis.TrellisArguments(form.trellis, codec.state())
            args.trellis = self.trellis.address
        if isinstance(codec.transform, RandomHadamard):
            args.signs = self._keep(codec.transform.signs(torch.device("cpu")))
        elif codec.transform is not IDENTITY:
            self.reason = f"transform {type(codec.transform).__name__}"
        if self.dim > structs.MOST_DIM:
            self.reason = f"width {self.dim} is above {structs.MOST_DIM}"

    @classmethod
    def of(cls, codec: Codec) -> Self:
        """Return the arguments of a codec, made once, and again when it has learnt."""
        found: Self | None = cls.made.get(codec)
        if found is None or (not found.learnt and codec.ready):
            found = cls.made[codec] = cls(codec)  # type: ignore[call-arg]
        return found

    def after(self, codec: Codec, arguments: trellis.TrellisArguments) -> None:
        """Take over a codec of trellises that has learnt, from the one before."""
        other = self.made[codec] = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.args, other.learnt = type(self.args).from_buffer_copy(self.args), True
        other.trellis, other.args.trellis = arguments, arguments.address

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()

    def place(self, args: Structure, source: SegmentSource) -> list[Where]:
        """Write down where the slots lie; what is returned has to stay as long as the arguments."""
        places = []
        for name, field in self.fields.items():
            found = source.where(field.name)
            if found is None:
                raise GeometryError("the slots have gaps in memory; backend='torch' reads them")
            setattr(args, name, (found.address, found.row, found.head))
            places.append(found)
        return places


class SlotFormat(CodecArguments):
    """A `kvp_stream`: how slots become numbers; `attend_reason`: why no kernel attends over them.

    `whole`: whether levels may be multiplied as whole numbers: `whole_format` in C.
    """

    made: ClassVar[WeakKeyDictionary[Codec, Any]] = WeakKeyDictionary()
    what = "format"

    def __init__(self, codec: Codec) -> None:
        form, stream = codec.form, structs.StreamStruct()
        parts = {} if form is None else form.parts
        super().__init__(codec, "" if form is None else form.kind, parts, stream)
        self.attend_reason, self.whole = self.reason, False
        if form is None or not form.kind:
            return
        stream.group = form.group if "fold" in parts or "shift" in parts else 0
        channels = stream.channels
        if channels < self.dim and (channels % 32 or -(-self.dim // channels) > MOST_GROUPS):
            self.attend_reason = self.reason or f"groups of {channels} channels"
        stream.kind = structs.KINDS[form.kind]
        stream.shift_scaled, stream.middle = form.shift_scaled, form.middle
        stream.treated = form.trellis is not None and codec.transform is IDENTITY
        if form.kind == "raw":
            stream.number = DTYPES[self.fields["codes"].dtype]
        stream.unit = form.unit
        self.whole = form.trellis is not None or (form.unit > 0 and form.bits in (2, 3, 4, 8))
        # At least 16: a vector register of levels is filled up with repetitions.
        stream.table = self._keep(form.points.repeat(max(16 >> form.bits, 1)))
