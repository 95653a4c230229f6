"""What encoding kernels are told of a codec when they are compiled, and the tables beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.of_codec import once_for_codec
from kvpact.kernels.triton.forms import CodeForm, form_parts, form_reason, power_of_two
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TreatedKeys
from kvpact.transforms import RandomHadamard

MOST_GROUP = 128
"""Tokens of the largest group."""


@dataclass(frozen=True)
class EncodeForm(CodeForm):
    """How the tokens of one stream become slots; see `Encoding`.

    - `choice`: the scale of a codebook, or the kind of 8-bit number.
    - `limit`: tokens without a larger magnitude can be encoded.
    - `treated`, `first`: whether channels of K are weighted and sorted into blocks, and whether the
      first key is a base.
    """

    names = ("codes", "scale", "zero", "mean", "base", "step")

    choice: str
    rotates: bool
    limit: float
    treated: bool
    first: bool

    @property
    def staged(self) -> bool:
        """Whether rotated tokens are kept in between, for statistics over groups of them."""
        return self.group > 1 and self.kind != "channel"

    @property
    def lenient(self) -> bool:
        """Whether some tokens beyond `limit` can be encoded, too."""
        scaled = self.kind == "float8" and self.has("scale")
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


class EncodeTables(NamedTuple):
    """What encoding kernels need of a codec, on a device.

    - `form`: what is compiled in.
    - `names`: the codec's field for each of `EncodeForm.names`, or None.
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
    if form.group > 1 and MOST_GROUP % form.group:
        return f"groups of {form.group} tokens"
    return form_reason(codec, form)


@once_for_codec
def tables_of(codec: Codec, device: torch.device) -> EncodeTables:
    """Return what kernels need of a codec that `encode_reason` lets pass."""
    encoding, transform = codec.encoding(), codec.transform
    assert encoding is not None and not encode_reason(codec), encode_reason(codec)
    names, parts = form_parts(codec, encoding, EncodeForm)
    form = EncodeForm(
        **parts,
        choice=encoding.choice,
        rotates=isinstance(transform, RandomHadamard),
        limit=encoding.limit,
        treated=isinstance(codec, TreatedKeys),
        first="first" in codec.state(),
    )
    signs = torch.zeros(1, dtype=torch.float32, device=device)
    if isinstance(transform, RandomHadamard):
        signs = transform.signs(device)
    boundaries, levels = (
        torch.tensor(numbers or (0.0,), dtype=torch.float32, device="cpu").to(device)
        for numbers in (encoding.boundaries, encoding.levels)
    )
    return EncodeTables(form, names, signs, boundaries, levels)
