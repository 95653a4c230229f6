"""What encoding kernels are told of a codec when they are compiled, and the tables beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.formats import TILE, CodesField, Field
from kvpact.formats.encoding import Encoding
from kvpact.formats.trellis import TrellisForm
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.triton.forms import LEAST_WIDTH, MOST_WIDTH, Planes, addresses_of, power_of_two
from kvpact.kernels.triton.trellis.steps import TrellisSteps, steps_of
from kvpact.methods import Codec
from kvpact.methods.trellis_keys import TreatedKeys
from kvpact.quantizers.trellis import LEAST
from kvpact.transforms import IDENTITY, RandomHadamard

SLOT_FIELDS = ("codes", "scale", "zero", "mean", "base", "step")
"""Rows of the table of addresses, as `Encoding` names them."""

_TRELLIS_TYPES = {"codes": "i32", "scale": "u8", "mean": "i8", "base": "i32", "step": "fp16"}

MOST_GROUP = 128
"""Tokens of the largest group."""


@dataclass(frozen=True)
class EncodeForm(Planes):
    """How the tokens of one stream become slots; see `Encoding`, whose names these are.

    - `order`: what a word of codes holds (see `CodesField`); ``number``: no words, `[dim, 32]`
      bytes.
    - `dim`, `padded`: channels of a vector, and of the tiles that kernels work on: a power of two.
    - `words`: words of a token's codes, for ``token``.
    - `choice`: the scale of a codebook, or the kind of 8-bit number.
    - `group`: tokens that are encoded together; 1 for none.
    - `limit`: tokens without a larger magnitude can be encoded.
    - `trellis`: what there is to know of a trellis.
    - `steps`: where its blocks' codes lie.
    - `treated`, `bases`, `first`: whether channels of K are weighted and sorted into blocks,
      whether tokens have bases, and whether the first key is one.
    """

    kind: Literal["codebook", "symmetric", "affine", "channel", "float8", "trellis"]
    bits: int
    order: Literal["token", "channel", "number"]
    dim: int
    padded: int
    words: int
    choice: str
    channels: int
    group: int
    rotates: bool
    limit: float
    scaled: bool
    trellis: TrellisForm | None = None
    steps: tuple[TrellisSteps, ...] = ()
    treated: bool = False
    bases: bool = False
    first: bool = False

    @property
    def staged(self) -> bool:
        """Whether rotated tokens are kept in between, for statistics over groups of them."""
        return self.group > 1 and self.kind != "channel"

    @property
    def lenient(self) -> bool:
        """Whether some tokens beyond `limit` can be encoded, too."""
        scaled = self.kind == "float8" and self.scaled
        return scaled or self.kind in ("codebook", "symmetric", "affine")

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
        """Whether groups of channels are the rows of a reshaped tile."""
        return self.groups == 1 or self.channels & (self.channels - 1) == 0

    @property
    def group_width(self) -> int:
        """Channels of a group in a tile that is shared out evenly."""
        return self.padded if self.groups == 1 else self.channels

    @property
    def padded_groups(self) -> int:
        """A power of two of groups of channels."""
        return self.padded // self.group_width if self.even else power_of_two(self.groups)

    def index_of(self, name: str) -> int:
        """Row of `SLOT_FIELDS`."""
        return SLOT_FIELDS.index(name)

    def type_of(self, name: str) -> str:
        """Dtype of a field, one of `forms.NUMBERS`."""
        if self.trellis is not None:
            return _TRELLIS_TYPES[name]
        return "fp16" if name != "codes" else "u8" if self.order == "number" else "i32"

    @property
    def word_tokens(self) -> int:
        """Tokens that no two programs may share: those of one word of codes."""
        return TILE // (self.bits & -self.bits) if self.order == "channel" else 1


class EncodeTables(NamedTuple):
    """What encoding kernels need of a codec, on a device.

    - `form`: what is compiled in.
    - `names`: the codec's field for each of `SLOT_FIELDS`, or None.
    - `signs`: fp32, of the rotation; one number where there is none.
    - `boundaries`, `levels`: fp32, of the codebook; one number where there is none.
    """

    form: EncodeForm
    names: tuple[str | None, ...]
    signs: Tensor
    boundaries: Tensor
    levels: Tensor


def encode_reason(codec: Codec) -> str:
    """Return why no kernel here encodes for a codec; "" if one does."""
    form = codec.encoding()
    if form is None:
        return f"no native encoding for {type(codec).__name__}"
    if form.kind == "balanced":
        return "tokens and channels of a group are balanced"
    if form.trellis is not None and min(block.dim for block in form.trellis.blocks) < LEAST:
        return f"trellises of less than {LEAST} channels"
    transform = codec.transform
    if transform is not IDENTITY and not isinstance(transform, RandomHadamard):
        return f"transform {type(transform).__name__}"
    if form.group > 1 and MOST_GROUP % form.group:
        return f"groups of {form.group} tokens"
    dim = _width(_codes(codec, form))
    return f"width {dim} is above {MOST_WIDTH}" if dim > MOST_WIDTH else ""


def _codes(codec: Codec, form: Encoding) -> Field:
    return next(field for field in codec.fields if field.name == form.codes)


def _width(codes: Field) -> int:
    return codes.dim if isinstance(codes, CodesField) else codes.shape[0]


def _form(codec: Codec) -> tuple[EncodeForm, Encoding]:
    form = codec.encoding()
    assert form is not None and form.kind != "balanced", encode_reason(codec)
    codes = _codes(codec, form)
    dim = _width(codes)
    by_token = isinstance(codes, CodesField) and codes.order == "token"
    order = codes.order if isinstance(codes, CodesField) else "number"
    made = EncodeForm(
        form.kind, form.bits, order, dim, max(power_of_two(dim), LEAST_WIDTH),
        codes.shape[1] if by_token else 0, form.choice, min(form.channels or dim, dim), form.group,
        isinstance(codec.transform, RandomHadamard), form.limit, form.scale is not None,
    )  # fmt: skip
    if form.trellis is not None:
        made = replace(
            made,
            trellis=form.trellis,
            steps=steps_of(form.trellis, by_token),
            treated=isinstance(codec, TreatedKeys),
            bases=form.base is not None,
            first="first" in codec.state(),
        )
    return made, form


_known: WeakKeyDictionary[Codec, dict[torch.device, EncodeTables]] = WeakKeyDictionary()


def tables_of(codec: Codec, device: torch.device) -> EncodeTables:
    """Return what kernels need of a codec that `encode_reason` lets pass, made once."""
    made = _known.setdefault(codec, {})
    if device not in made:
        form, encoding = _form(codec)
        names = tuple(getattr(encoding, name) for name in SLOT_FIELDS)
        transform, signs = codec.transform, torch.zeros(1, dtype=torch.float32, device=device)
        if isinstance(transform, RandomHadamard):
            signs = transform.signs(device)
        boundaries, levels = (
            torch.tensor(numbers or (0.0,), dtype=torch.float32, device="cpu").to(device)
            for numbers in (encoding.boundaries, encoding.levels)
        )
        made[device] = EncodeTables(form, names, signs, boundaries, levels)
    return made[device]


class EncodeSlots(NamedTuple):
    """Where the slots of a batch lie, for encoders.

    `table`, `heads`: on the device, of `SLOT_FIELDS`; as those of `forms.Places`.
    """

    table: Tensor
    heads: Tensor
    segments: int
    tiles: int

    @classmethod
    def of(
        cls, codec: Codec, sources: Sequence[SegmentSource], batch: int, device: torch.device
    ) -> EncodeSlots:
        """Return where slots lie. `sources`: one for all rows, or one for each."""
        names = tables_of(codec, device).names
        held = [
            [None if name is None else source.where(name) for name in names] for source in sources
        ]
        for where in held:
            pairs = zip(names, where, strict=True)
            if any(name is not None and lies is None for name, lies in pairs):
                raise GeometryError("the storage of slots has gaps, or segments differ in strides")
        table, heads = addresses_of(held, batch, device)
        return cls(table, heads, table.shape[2], sources[0].segment_tokens // TILE)

    def row(self, index: int) -> EncodeSlots:
        """Return where one row's slots lie."""
        table = self.table[:, index : index + 1].contiguous()
        return self._replace(table=table)
