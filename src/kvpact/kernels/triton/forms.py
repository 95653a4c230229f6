"""What kernels are told of one stream's slots when they are compiled, and tables beside it.

A `SlotForm` is hashable and is passed to kernels as one constant: each one makes a variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import CodesField, Field
from kvpact.formats.bitpack import WORD, block_words, planes
from kvpact.formats.packed import PackedFormat
from kvpact.formats.trellis import TrellisForm
from kvpact.kernels.sources import SegmentSource, Where
from kvpact.kernels.triton.trellis.steps import TrellisSteps, steps_of
from kvpact.methods import Codec
from kvpact.quantizers import trellis
from kvpact.transforms import IDENTITY, RandomHadamard

FIELDS = ("codes", "scale", "zero", "fold", "shift", "base", "mean", "step")
"""Rows of `Places.table`, as `PackedFormat` names them."""

NUMBERS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
"""Dtypes by the names that kernels know."""

LEAST_WIDTH, MOST_WIDTH = 32, 1024
"""Channels that a tile of a kernel holds at least (of 1 bit, a word), and of the widest vectors."""


class Planes:
    """Where the bits of codes lie, of forms that have `bits` and `dim` (see `formats.bitpack`)."""

    bits: int
    dim: int

    def plane_count(self) -> int:
        """How many planes codes lie in."""
        return len(planes(self.bits))

    def plane_width(self, plane: int) -> int:
        """Bits of a plane."""
        return planes(self.bits)[plane]

    def plane_shift(self, plane: int) -> int:
        """Bits of a code below those of a plane; of V's, also rows of words before the plane's."""
        return sum(planes(self.bits)[:plane])

    def plane_words(self, plane: int) -> int:
        """Words of a token of K before those of a plane."""
        return sum(-(-self.dim * width // WORD) for width in planes(self.bits)[:plane])


@dataclass(frozen=True)
class SlotForm(Planes):
    """How the slots of one stream become numbers; see `PackedFormat` for the formulas.

    - `kind`: as in `PackedFormat`.
    - `order`: what a word of codes holds (see `CodesField`); ``number``: no words, `[dim, 32]`
      numbers of `types[0]` per tile.
    - `dim`, `padded`: channels of a vector (of a trellis: its codes), and the next power of two.
    - `words`: words of a token's codes, for ``token``; rows of words of a tile for ``channel``.
    - `channels`, `group`, `shift_scaled`, `middle`, `unit`: as in `PackedFormat`; `channels` is
      `dim` where all share a scale.
    - `of_values`: whether fold and shift are V's (see `PackedFormat`). (Kernels can't read a
      parameter named ``value``: every constant of theirs has one.)
    - `types`: dtype of each of `FIELDS`, a value of `NUMBERS`; "" for a field that is not there.
    - `whole`: whether levels are whole numbers of 8 bits.
    - `signed`: whether a code is its level in two's complement, but for its top bit.
    - `trellis`: what there is to know of a trellis.
    - `steps`: where its blocks' codes lie.
    """

    kind: Literal["table", "linear", "raw", "e4m3", "e5m2", "trellis"]
    bits: int
    order: Literal["token", "channel", "number"]
    dim: int
    padded: int
    words: int
    channels: int
    group: int
    shift_scaled: bool
    middle: float
    unit: float
    of_values: bool
    types: tuple[str, ...]
    whole: bool
    signed: bool
    trellis: TrellisForm | None = None
    steps: tuple[TrellisSteps, ...] = ()

    def has(self, name: str) -> bool:
        """Whether there is a field of that name."""
        return bool(self.type_of(name))

    def type_of(self, name: str) -> str:
        """Dtype of a field, one of `NUMBERS`; "" for a field that is not there."""
        return self.types[self.index_of(name)]

    def index_of(self, name: str) -> int:
        """Row of `FIELDS`."""
        return FIELDS.index(name)


class Slots(NamedTuple):
    """What kernels are told of a codec, made once.

    - `form`: None where `reason` says why no kernel reads the slots.
    - `reason`: empty if there is a form.
    - `names`: the codec's field for each of `FIELDS`, or None.
    - `levels`: fp32 on the codec's device: the number of each code (``table``), its least number
      (``linear``), or of each level (``trellis``, all blocks' one behind the other).
    - `learnt`: whether the codec had learnt what it learns.
    - `numbers`: the same as `levels`, on the host; empty for trellises, whose `form` says them.
    """

    form: SlotForm | None
    reason: str
    names: tuple[str | None, ...] = ()
    levels: Tensor | None = None
    learnt: bool = True
    numbers: tuple[float, ...] = ()


class Places(NamedTuple):
    """Where the slots of a batch lie.

    `table`: `[8, B, segments]` int64 on the device: the address of each of `FIELDS`, of each row's
    segments, of the first head; 0 for a field that is not there. `heads`: `[8]` int64 on the
    device: bytes from one head to the next.
    """

    table: Tensor
    heads: Tensor
    segment_tokens: int


def power_of_two(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _order(codes: Field) -> Literal["token", "channel", "number"]:
    return codes.order if isinstance(codes, CodesField) else "number"


def _reason(codec: Codec, form: PackedFormat | None, dim: int) -> str:
    if form is None:
        return f"no packed format for {type(codec).__name__}"
    if dim > MOST_WIDTH:
        return f"width {dim} is above {MOST_WIDTH}"
    if form.trellis is not None and min(b.dim for b in form.trellis.blocks) < trellis.LEAST:
        return f"trellises of less than {trellis.LEAST} channels"
    if codec.transform is not IDENTITY and not isinstance(codec.transform, RandomHadamard):
        return f"transform {type(codec.transform).__name__}"
    return ""


def _levels(form: PackedFormat) -> Tensor:
    if form.trellis is None:
        numbers = [level * form.unit for level in form.levels] or [0.0]
        return torch.tensor(numbers, dtype=torch.float32, device="cpu")
    held = [block.bits for block in form.trellis.blocks if block.bits]
    return torch.cat([trellis.levels(bits, torch.device("cpu")) for bits in held])


def _slots(codec: Codec, value: bool, device: torch.device) -> Slots:
    form = codec.packed_format()
    if form is None:
        return Slots(None, _reason(codec, None, 0))
    fields = {field.name: field for field in codec.fields}
    codes = fields[form.codes]
    order = _order(codes)
    dim = codes.dim if isinstance(codes, CodesField) else codes.shape[0]
    if reason := _reason(codec, form, dim):
        return Slots(None, reason)
    names = tuple(getattr(form, name) for name in FIELDS)
    words = 0
    if isinstance(codes, CodesField):
        blocks = codes.blocks or ((dim, codes.bits),)
        words = block_words(blocks) if order == "token" else codes.bits
    types = tuple(NUMBERS[fields[name].dtype] if name else "" for name in names)
    steps = steps_of(form.trellis, order == "token") if form.trellis else ()
    made = SlotForm(
        form.kind, form.bits, order, dim, max(power_of_two(dim), LEAST_WIDTH), words,
        form.channels or dim, form.group, form.shift_scaled, form.middle, form.unit,
        value, types, form.whole, form.signed, form.trellis, steps,
    )  # fmt: skip
    return Slots(made, "", names, _levels(form).to(device), codec.ready, form.levels)


_known: WeakKeyDictionary[Codec, dict[tuple[bool, torch.device], Slots]] = WeakKeyDictionary()


def slots_of(codec: Codec, value: bool, device: torch.device) -> Slots:
    """Return what kernels are told of a codec, of V or of K; anew when it has learnt."""
    made = _known.setdefault(codec, {})
    found = made.get((value, device))
    if found is None or (codec.ready and not found.learnt):
        found = made[value, device] = _slots(codec, value, device)
    return found


def places_of(
    source: SegmentSource, slots: Slots, batch: int, device: torch.device
) -> Places | None:
    """Return where slots lie, made once for a source; None if not as kernels need them."""
    key = f"triton:{batch}"
    found: Places | None = source.prepared.get(key)
    if found is not None:
        return found
    held = [None if name is None else source.where(name) for name in slots.names]
    if any(
        name is not None and where is None for name, where in zip(slots.names, held, strict=True)
    ):
        return None
    made = Places(*addresses_of([held], batch, device), source.segment_tokens)
    source.prepared[key] = made
    return made


def addresses_of(
    sources: Sequence[Sequence[Where | None]], batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return where fields lie, on the device.

    `sources`: where each field lies, None for one that is not there: of one source for all rows, or
    of one for each. Raises `GeometryError`.
    """
    count = max(len(where.segments) for held in sources for where in held if where is not None)
    # numpy sets a number in a tenth of the time that torch takes.
    table = np.zeros((len(sources[0]), batch, count), dtype=np.int64)
    heads = np.zeros(len(sources[0]), dtype=np.int64)
    each = batch // len(sources)
    rows = np.arange(each, dtype=np.int64)[:, None]
    for number, held in enumerate(sources):
        part = table[:, number * each : (number + 1) * each]
        for index, where in enumerate(held):
            if where is None:
                continue
            if number and heads[index] != where.head:
                raise GeometryError("the heads of some rows lie otherwise; attend to each alone")
            part[index, :, : len(where.segments)] = where.segments + rows * where.row
            heads[index] = where.head
    return sent(torch.from_numpy(table), device), sent(torch.from_numpy(heads), device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context of launches on a device; Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; the host does not wait for it to arrive."""
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
