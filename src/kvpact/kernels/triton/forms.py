"""The constants of one stream's slots with which kernels are compiled, and their tables.

A `SlotForm` is hashable and is passed to kernels as one constant: each one makes a variant.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import TILE
from kvpact.formats.bitpack import WORD, planes
from kvpact.formats.form import Form
from kvpact.kernels.of_codec import once_for_codec
from kvpact.kernels.sources import SegmentSource, Where
from kvpact.kernels.triton.trellis.steps import Run, TrellisSteps, runs_of, steps_of
from kvpact.methods import Codec
from kvpact.quantizers import trellis
from kvpact.snapshot.pages import sent
from kvpact.transforms import IDENTITY, RandomHadamard

NUMBERS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
"""Dtypes by the names that kernels know."""

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
LEAST_WIDTH, MOST_WIDTH = 32, 1024
"""Channels that a tile of a kernel holds at least (of 1 bit, a word), and of the widest vectors."""


MOST_GROUP = 128  # tokens of the largest group that is encoded


@dataclass(frozen=True)
class SlotForm(Form):
    """A form, and the layout that kernels give it, to read and to write."""

    names: ClassVar[tuple[str, ...]] = (
        "codes", "scale", "zero", "fold", "shift", "base", "mean", "step",
    )  # fmt: skip
    """Parts of a form, which are rows of `SlotPlaces.table`."""

    rotates: bool = False  # vectors are rotated before they are stored
    from_zero: bool = False  # a grid around a middle is taken from code 0 on, in whole numbers

    @property
    def kind(self) -> str:
        """As of a form; ``linear`` from code 0 on."""
        return "linear" if self.from_zero else super().kind

    @property
    def middle(self) -> float:
        """As of a form; none from code 0 on."""
        return 0.0 if self.from_zero else super().middle

    @property
    def whole(self) -> bool:
        """True if numbers are whole numbers of 8 bits, none of them a half."""
        return self.unit == self.levels.unit

    @cached_property
    def padded(self) -> int:
        """Channels of the tiles that kernels work on: the next power of two."""
        return width_of(self.dim)

    @cached_property
    def words(self) -> int:
        """Words of a token's codes, for ``token``; rows of words of a tile for ``channel``."""
        return self.fields[0].shape[self.order == "token"] if self.in_words else 0

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Dtype of each of `names`, a value of `NUMBERS`; "" for a field that is not there."""
        parts = self.parts
        return tuple(NUMBERS[parts[x].dtype] if x in parts else "" for x in self.names)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Planes of a trellis' blocks that lie together."""
        return runs_of(self.trellis, self.order == "token") if self.trellis else ()

    @cached_property
    def steps(self) -> tuple[TrellisSteps, ...]:
        """The places of the codes of a trellis' blocks."""
        return steps_of(self.trellis, self.runs) if self.trellis else ()

    @property
    def treated(self) -> bool:
        """True if channels are weighted and sorted into blocks of trellises."""
        return self.trellis is not None and not self.rotates

    @property
    def staged(self) -> bool:
        """True if rotated tokens are kept in between, for statistics over groups of them."""
        return self.group > 1 and self.encoder != "channel"

    @property
    def lenient(self) -> bool:
        """True if some tokens beyond `limit` can be encoded, too."""
        scaled = self.encoder == "float8" and self.has("scale")
        return scaled or self.encoder in ("codebook", "symmetric", "affine")

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return -(-self.dim // self.channels)

    @property
    def root(self) -> float:
        """Square root of the width."""
        return math.sqrt(self.dim)

    @property
    def even(self) -> bool:
        """True if groups of channels are the rows of a reshaped tile."""
        return self.groups == 1 or self.channels & (self.channels - 1) == 0

    @property
    def group_width(self) -> int:
        """Channels of a group in a tile that is shared out evenly."""
        return self.padded if self.groups == 1 else self.channels

    @property
    def padded_groups(self) -> int:
        """A power of two of groups of channels."""
        return self.padded // self.group_width if self.even else power_of_two(self.groups)

    def has(self, name: str) -> bool:
        """Return whether there is a field of that name."""
        return bool(self.type_of(name))

    def type_of(self, name: str) -> str:
        """Dtype of a field, one of `NUMBERS`; "" for a field that is not there."""
        return self.types[self.index_of(name)]

    def index_of(self, name: str) -> int:
        """Row of `names`."""
        return self.names.index(name)

    def plane_count(self) -> int:
        """Return how many planes codes lie in (see `formats.bitpack`)."""
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


class Slots(NamedTuple):
    """The arguments of kernels for a codec, made once."""

    form: SlotForm | None  # compiled into kernels that read the slots, whatever rule wrote them
    reason: str  # why none reads
    written: SlotForm | None  # compiled into those that write
    encode_reason: str  # why none writes
    signs: Tensor = _NOTHING  # fp32, of the rotation; one number where there is none
    boundaries: Tensor = _NOTHING  # fp32, between `levels`
    levels: Tensor = _NOTHING  # fp32 by code; the least one (linear), of all blocks (trellis)

    @property
    def known(self) -> SlotForm:
        """The form of a codec for which a kernel encodes."""
        assert self.written is not None, self.encode_reason
        return self.written


class SlotPlaces(NamedTuple):
    """The places of the slots of a batch, int64 on the device; 0 for a field that is not there."""

    table: Tensor  # `[fields, B, segments]`: addresses of each row's segments, of the first head
    heads: Tensor  # `[fields]`: bytes from one head to the next
    segment_tokens: int

    @classmethod
    def of(
        cls,
        form: SlotForm,
        sources: Sequence[SegmentSource],
        batch: int,
        device: torch.device,
    ) -> Self:
        """Return where fields lie, of one source for all rows or one each; or `GeometryError`."""
        found = [_lie(form, source) for source in sources]
        count = max(len(where.segments) for held in found for where in held.values())
        # numpy sets a number in a tenth of the time that torch takes.
        table = np.zeros((len(form.names), batch, count), dtype=np.int64)
        heads = np.zeros(len(form.names), dtype=np.int64)
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

    def row(self, index: int) -> Self:
        """Return where one row's slots lie."""
        return self._replace(table=self.table[:, index : index + 1].contiguous())


def _lie(form: SlotForm, source: SegmentSource) -> dict[int, Where]:
    """Return where the fields that are there lie, by their places among the names."""
    found = {}
    for part, field in form.parts.items():
        where = source.where(field.name)
        if where is None:
            raise GeometryError("the slots have gaps in memory; backend='torch' reads them")
        found[form.index_of(part)] = where
    return found


def power_of_two(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def width_of(dim: int) -> int:
    """Return to how many channels kernels pad vectors."""
    return max(power_of_two(dim), LEAST_WIDTH)


def _reason(codec: Codec, form: Form) -> str:
    """Return why no kernel knows how a codec's codes lie; "" if one does."""
    if form.trellis is not None and min(b.dim for b in form.trellis.blocks) < trellis.LEAST:
        return f"trellises of less than {trellis.LEAST} channels"
    if codec.transform is not IDENTITY and not isinstance(codec.transform, RandomHadamard):
        return f"transform {type(codec.transform).__name__}"
    return f"width {form.dim} is above {MOST_WIDTH}" if form.dim > MOST_WIDTH else ""


def _encode_reason(codec: Codec, form: Form) -> str:
    """Return why no kernel encodes for a codec whose codes are known; "" if one does."""
    if not form.encoder:
        return f"no native encoding for {type(codec).__name__}"
    if form.encoder == "balanced":
        return "tokens and channels of a group are balanced"
    if form.group > 1 and MOST_GROUP % form.group:
        return f"groups of {form.group} tokens"
    return ""


def _levels(form: Form) -> Tensor:
    if form.trellis is None:
        return form.points
    held = [block.bits for block in form.trellis.blocks if block.bits]
    return torch.cat([trellis.levels(bits, torch.device("cpu")) for bits in held])


@once_for_codec
def slots_of(codec: Codec, device: torch.device) -> Slots:
    """Return the arguments of kernels for a codec."""
    form, name = codec.form, type(codec).__name__
    if form is None:
        return Slots(None, f"no packed format for {name}", None, f"no native encoding for {name}")
    known = _reason(codec, form)
    encode_reason = _encode_reason(codec, form) or known
    reason = known if form.kind else f"no packed format for {name}"
    rotation = codec.transform if isinstance(codec.transform, RandomHadamard) else None
    given = {field.name: getattr(form, field.name) for field in fields(Form)}
    written, levels = SlotForm(**given, rotates=rotation is not None), _levels(form)
    read = replace(written, rule="", limit=math.inf)
    tables = levels if rotation is None else rotation.signs(device), (levels[1:] + levels[:-1]) / 2
    forms = None if reason else read, reason, None if encode_reason else written, encode_reason
    return Slots(*forms, *(x.to(device) for x in (*tables, levels)))


def places_of(
    source: SegmentSource, form: SlotForm, batch: int, device: torch.device
) -> SlotPlaces:
    """Return where slots lie, made once for a source; see `SlotPlaces.of`."""
    key = f"triton:{batch}"
    found: SlotPlaces | None = source.prepared.get(key)
    if found is None:
        found = source.prepared[key] = SlotPlaces.of(form, [source], batch, device)
    return found


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context of launches on a device; Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
