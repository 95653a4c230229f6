"""What kernels are told of one stream's slots when they are compiled, and tables beside it.

A `SlotForm` is hashable and is passed to kernels as one constant: each one makes a variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import TILE
from kvpact.formats.bitpack import WORD, plane_runs, planes
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat, TrellisForm
from kvpact.kernels.of_codec import once_for_codec, order_and_width, slot_fields
from kvpact.kernels.sources import SegmentSource, Where
from kvpact.methods import Codec
from kvpact.quantizers import trellis
from kvpact.transforms import IDENTITY, RandomHadamard


@dataclass(frozen=True)
class Plane:
    """Where the bits of one plane of a block lie.

    - `width`, `shift`: bits of an item, and those of the code below them; no plane has 0 bits.
    - `row`: of the first word, among those of a token (K) or of a tile (V).
    - `before`: items of other blocks in the same words.
    """

    width: int = 0
    shift: int = 0
    row: int = 0
    before: int = 0

    @property
    def mask(self) -> int:
        """The bits of an item."""
        return (1 << self.width) - 1


@dataclass(frozen=True)
class TrellisSteps:
    """A block of channels, which are the steps of one trellis.

    - `begin`, `dim`, `bits`: first channel, channels, bits of a code.
    - `memory`: how many steps before its own the oldest bit is that an index needs.
    - `words`: words that the steps of K's trellis take turns in; 0 if they lie in their order.
    - `wider`: wider codes of one word.
    - `low`, `high`: the lowest plane, and the other one.
    - `levels`: place of the first level among those of all blocks.
    - `unit`: what a level of 1 is worth.
    """

    begin: int
    dim: int
    bits: int
    memory: int
    words: int
    wider: int
    low: Plane
    high: Plane
    levels: int
    unit: float


def steps_of(form: TrellisForm, by_token: bool) -> tuple[TrellisSteps, ...]:
    """Return the blocks that have bits. `by_token`: whether a word holds codes of one token (K)."""
    held: dict[int, list[Plane]] = {}
    row = 0
    for width, parts in plane_runs(tuple((block.dim, block.bits) for block in form.blocks)):
        before = 0
        for index, shift, dim in parts:
            held.setdefault(index, []).append(Plane(width, shift, row, before))
            before += dim
        row += -(-before * width // WORD) if by_token else width
    made: list[TrellisSteps] = []
    begin = levels = 0
    for index, block in enumerate(form.blocks):
        if block.bits:
            low, *others = sorted(held[index], key=lambda plane: plane.shift)
            width = planes(block.bits)[0] if block.bits > 1 else form.interleave
            words, rest = divmod(block.dim * width, WORD)
            high = others[0] if others else Plane()
            one = TrellisSteps(
                begin, block.dim, block.bits, block.states.bit_length() - 1, 0 if rest else words,
                form.interleave // width, low, high, levels, trellis.UNITS[block.bits],
            )  # fmt: skip
            made.append(one)
            levels += 2 << block.bits
        begin += block.dim
    return tuple(made)


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


@dataclass(frozen=True)
class CodeForm:
    """How codes lie in the slots of one stream, and what stands beside them; to read or to write.

    - `kind`, `bits`, `group`: as in `PackedFormat` or `Encoding`.
    - `order`: what a word of codes holds (see `CodesField`); ``number``: no words, `[dim, 32]`
      numbers of `types[0]` per tile.
    - `dim`, `padded`: channels of a vector (of a trellis: its codes), and of the tiles that kernels
      work on: the next power of two.
    - `words`: words of a token's codes, for ``token``; rows of words of a tile for ``channel``.
    - `channels`: that share a scale; `dim` where all do.
    - `types`: dtype of each of `names`, a value of `NUMBERS`; "" for a field that is not there.
    - `trellis`: what there is to know of a trellis.
    - `steps`: where its blocks' codes lie.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """Rows of `Places.table`."""

    kind: str
    bits: int
    order: Literal["token", "channel", "number"]
    dim: int
    padded: int
    words: int
    channels: int
    group: int
    types: tuple[str, ...]
    trellis: TrellisForm | None
    steps: tuple[TrellisSteps, ...]

    def has(self, name: str) -> bool:
        """Whether there is a field of that name."""
        return bool(self.type_of(name))

    def type_of(self, name: str) -> str:
        """Dtype of a field, one of `NUMBERS`; "" for a field that is not there."""
        return self.types[self.index_of(name)]

    def index_of(self, name: str) -> int:
        """Row of `names`."""
        return self.names.index(name)

    def plane_count(self) -> int:
        """How many planes codes lie in (see `formats.bitpack`)."""
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
class SlotForm(CodeForm):
    """How the slots of one stream become numbers; see `PackedFormat` for the formulas.

    - `shift_scaled`, `middle`, `unit`: as in `PackedFormat`.
    - `whole`: whether levels are whole numbers of 8 bits.
    - `signed`: whether a code is its level in two's complement, but for its top bit.
    """

    names = ("codes", "scale", "zero", "fold", "shift", "base", "mean", "step")

    shift_scaled: bool
    middle: float
    unit: float
    whole: bool
    signed: bool


class Slots(NamedTuple):
    """What kernels are told of a codec, made once.

    - `form`: None where `reason` says why no kernel reads the slots.
    - `reason`: empty if there is a form.
    - `names`: the codec's field for each of `SlotForm.names`, or None.
    - `levels`: fp32 on the codec's device: the number of each code (``table``), its least number
      (``linear``), or of each level (``trellis``, all blocks' one behind the other).
    - `numbers`: the same as `levels`, on the host; empty for trellises, whose `form` says them.
    """

    form: SlotForm | None
    reason: str
    names: tuple[str | None, ...] = ()
    levels: Tensor | None = None
    numbers: tuple[float, ...] = ()


class Places(NamedTuple):
    """Where the slots of a batch lie.

    `table`: `[fields, B, segments]` int64 on the device: the address of each field, of each row's
    segments, of the first head; 0 for a field that is not there. `heads`: `[fields]` int64 on the
    device: bytes from one head to the next.
    """

    table: Tensor
    heads: Tensor
    segment_tokens: int

    @classmethod
    def of(
        cls,
        names: Sequence[str | None],
        sources: Sequence[SegmentSource],
        batch: int,
        device: torch.device,
    ) -> Places:
        """Return where fields lie, on the device.

        `names`: of the fields, None for one that is not there. `sources`: one for all rows, or one
        for each. Raises `GeometryError`.
        """
        found = [_lie(names, source) for source in sources]
        count = max(len(where.segments) for held in found for where in held.values())
        # numpy sets a number in a tenth of the time that torch takes.
        table = np.zeros((len(names), batch, count), dtype=np.int64)
        heads = np.zeros(len(names), dtype=np.int64)
        each = batch // len(sources)
        rows = np.arange(each, dtype=np.int64)[:, None]
        for number, held in enumerate(found):
            part = table[:, number * each : (number + 1) * each]
            for index, where in held.items():
                if number and heads[index] != where.head:
                    raise GeometryError("the heads of some rows lie otherwise; take each alone")
                part[index, :, : len(where.segments)] = where.segments + rows * where.row
                heads[index] = where.head
        at, steps = (sent(torch.from_numpy(x), device) for x in (table, heads))
        return cls(at, steps, sources[0].segment_tokens)

    @property
    def segments(self) -> int:
        """Segments of a row, at most."""
        return self.table.shape[2]

    @property
    def tiles(self) -> int:
        """Tiles of 32 tokens of a segment."""
        return self.segment_tokens // TILE

    def row(self, index: int) -> Places:
        """Return where one row's slots lie."""
        return self._replace(table=self.table[:, index : index + 1].contiguous())


def _lie(names: Sequence[str | None], source: SegmentSource) -> dict[int, Where]:
    """Return where the fields that are there lie, by their places among the names."""
    found = {}
    for index, name in enumerate(names):
        if name is not None:
            where = source.where(name)
            if where is None:
                raise GeometryError("the slots have gaps in memory; backend='torch' reads them")
            found[index] = where
    return found


def power_of_two(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def width_of(dim: int) -> int:
    """Return to how many channels kernels pad vectors."""
    return max(power_of_two(dim), LEAST_WIDTH)


def form_reason(codec: Codec, form: PackedFormat | Encoding) -> str:
    """Return why no kernel knows how a codec's codes lie; "" if one does."""
    if form.trellis is not None and min(b.dim for b in form.trellis.blocks) < trellis.LEAST:
        return f"trellises of less than {trellis.LEAST} channels"
    if codec.transform is not IDENTITY and not isinstance(codec.transform, RandomHadamard):
        return f"transform {type(codec.transform).__name__}"
    dim = order_and_width(slot_fields(codec, form, ("codes",))["codes"])[1]
    return f"width {dim} is above {MOST_WIDTH}" if dim > MOST_WIDTH else ""


def form_parts(
    codec: Codec, form: PackedFormat | Encoding, kind: type[CodeForm]
) -> tuple[tuple[str | None, ...], dict[str, Any]]:
    """Return the codec's field for each of a form's names, or None; and what a `CodeForm` has."""
    fields = slot_fields(codec, form, kind.names)
    order, dim = order_and_width(fields["codes"])
    return tuple(fields[name].name if name in fields else None for name in kind.names), {
        "kind": form.kind,
        "bits": form.bits,
        "order": order,
        "dim": dim,
        "padded": width_of(dim),
        "words": 0 if order == "number" else fields["codes"].shape[order == "token"],
        "channels": min(form.channels or dim, dim),
        "group": form.group,
        "types": tuple(NUMBERS[fields[x].dtype] if x in fields else "" for x in kind.names),
        "trellis": form.trellis,
        "steps": steps_of(form.trellis, order == "token") if form.trellis else (),
    }


def _levels(form: PackedFormat) -> Tensor:
    if form.trellis is None:
        numbers = [level * form.unit for level in form.levels] or [0.0]
        return torch.tensor(numbers, dtype=torch.float32, device="cpu")
    held = [block.bits for block in form.trellis.blocks if block.bits]
    return torch.cat([trellis.levels(bits, torch.device("cpu")) for bits in held])


@once_for_codec
def slots_of(codec: Codec, device: torch.device) -> Slots:
    """Return what kernels are told of a codec."""
    form = codec.packed_format()
    if form is None:
        return Slots(None, f"no packed format for {type(codec).__name__}")
    if reason := form_reason(codec, form):
        return Slots(None, reason)
    names, parts = form_parts(codec, form, SlotForm)
    made = SlotForm(
        **parts,
        shift_scaled=form.shift_scaled,
        middle=form.middle,
        unit=form.unit,
        whole=form.whole,
        signed=form.signed,
    )
    return Slots(made, "", names, _levels(form).to(device), form.levels)


def places_of(source: SegmentSource, slots: Slots, batch: int, device: torch.device) -> Places:
    """Return where slots lie, made once for a source; see `Places.of`."""
    key = f"triton:{batch}"
    found: Places | None = source.prepared.get(key)
    if found is None:
        found = source.prepared[key] = Places.of(slots.names, [source], batch, device)
    return found


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context of launches on a device; Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; the host does not wait for it to arrive."""
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
