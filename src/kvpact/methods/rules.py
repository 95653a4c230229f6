"""Rules: how codes and sides of a `Form` are chosen; and the codec that a form and a rule make.

A rule is a function of a form, transformed tokens and the sides of a group that was cut. Kernels
know those below and KVarN's by their names (`Form.encoder`); another one is computed by torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.errors import RegistrationError
from kvpact.formats.form import CODEBOOK_RULES, DTYPES, RULES_OF, Form, Levels, Side
from kvpact.methods.base import Arrays, Codec
from kvpact.quantizers import codebooks, numbers, uniform
from kvpact.quantizers.codebooks import Codebook
from kvpact.quantizers.numbers import HALF_MAX, cast, from_fp8, half, to_fp8
from kvpact.transforms import IDENTITY, Transform

Rule = Callable[[Form, Tensor, Arrays | None], dict[str, Tensor]]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Let forms name a rule; a decorator."""

    def added(function: Rule) -> Rule:
        if name in RULES_OF and not function.__module__.startswith("kvpact."):
            raise RegistrationError(f"kvpact has a rule named {name!r}; choose another name")
        RULES[name] = function
        return function

    return added


class FormCodec(Codec):
    """One stream that a form says all about, of transformed vectors; see `Codec`.

    Raises `RegistrationError` where nobody registered the form's rule.
    """

    def __init__(
        self,
        form: Form,
        transform: Transform = IDENTITY,
        max_abs: float = math.inf,
        max_norm: float = math.inf,
    ) -> None:
        if form.rule not in RULES:
            known = ", ".join(sorted(RULES))
            raise RegistrationError(
                f"no rule {form.rule!r}: decorate it with @rule. Known: {known}"
            )
        self.form = self._form = form
        self.fields, self.group, self.transform = form.fields, form.group, transform
        self.max_abs, self.max_norm = max_abs, max_norm

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Transform, and apply the rule."""
        return RULES[self._form.rule](self._form, self.transform.forward(x), frozen)

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the transform: levels, then the sides in their order."""
        y = numbers_of(self._form.levels, arrays[self._form.codes])
        for side in self._form.sides:
            y = applied(side, y, arrays[side.name])
        return y


def numbers_of(levels: Levels, codes: Tensor) -> Tensor:
    """Return what codes stand for, fp32."""
    if levels.kind == "book":
        return codebooks.lookup(codes, Codebook(levels.values, levels.unit))
    if levels.kind == "float":
        return from_fp8(codes, levels.number)
    y = codes.to(torch.float32)
    return y - levels.zero_code if levels.zero_code else y


def applied(side: Side, y: Tensor, numbers: Tensor) -> Tensor:
    """Multiply by or add the numbers of a side to `[B, H, T, D]`."""
    numbers, dim, tokens = numbers.to(torch.float32), y.shape[-1], side.tokens
    if tokens > 1:
        y, numbers = torch.unflatten(y, 2, (-1, tokens)), numbers.unsqueeze(3)
    elif numbers.shape[-1] > 1:
        numbers = numbers.repeat_interleave(side.channels, -1)[..., :dim]
    y = y * numbers if side.op == "mul" else y + numbers
    return y.flatten(2, 3) if tokens > 1 else y


def grouped(x: Tensor, channels: int) -> Tensor:
    """Split the channels into groups; a short last group repeats its last channel."""
    channels = channels or x.shape[-1]
    missing = -x.shape[-1] % channels
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    return torch.unflatten(x, -1, (-1, channels))


@rule("cast")
def _cast(form: Form, x: Tensor, frozen: Arrays | None) -> dict[str, Tensor]:
    """Keep the numbers themselves."""
    return {form.codes: cast(x, DTYPES[form.levels.number], "a value")}


@rule("absmax")
def _absmax(form: Form, x: Tensor, frozen: Arrays | None) -> dict[str, Tensor]:
    """Let a scale make the largest magnitude the largest level."""
    if form.levels.kind == "float":
        return _floats(form, x)
    codes, scale = uniform.quantize_symmetric(grouped(x, form.channels), form.levels.bits)
    return {"codes": codes.flatten(-2)[..., : form.dim], "scale": scale.squeeze(-1)}


def _floats(form: Form, x: Tensor) -> dict[str, Tensor]:
    kind = form.levels.number
    if not form.sides:
        return {"codes": to_fp8(x, kind, saturate=False)}
    limit = torch.finfo(numbers.FP8[kind]).max
    scale = half(divide(x.abs().amax(-1, keepdim=True), limit), "scale")
    # A scale that underflows to zero stores zeros; rounding of the scale can carry the largest
    # value just over the limit, hence saturate.
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32)
    return {"codes": to_fp8(x / safe, kind, saturate=True), "scale": scale}


@rule("minmax")
def _minmax(form: Form, x: Tensor, frozen: Arrays | None) -> dict[str, Tensor]:
    """Span least and largest number, of a token's channels or of a channel's tokens."""
    bits, group = form.levels.bits, form.group
    if frozen is not None:
        return {"codes": uniform.quantize_affine(x, frozen["scale"], frozen["zero"], bits)}
    x = grouped(x, form.channels) if group == 1 else torch.unflatten(x, 2, (-1, group)).mT
    scale, zero = uniform.affine_grid(x, bits)
    codes = uniform.quantize_affine(x, scale, zero, bits)
    flat = codes.flatten(-2)[..., : form.dim] if group == 1 else codes.mT.flatten(2, 3)
    return {"codes": flat, "scale": scale.squeeze(-1), "zero": zero.squeeze(-1)}


def centered(form: Form, y: Tensor, frozen: Arrays | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Take out the mean of each group of tokens, if there are groups; return it, too."""
    if frozen is not None:
        return y - frozen["mean"].to(torch.float32), {}
    if form.group == 1:
        return y, {}
    tiles = torch.unflatten(y, 2, (-1, form.group))
    mean = half((tree_sum(tiles, 3) / form.group).squeeze(3), "mean of a tile")
    return (tiles - mean.to(torch.float32).unsqueeze(3)).flatten(2, 3), {"mean": mean}


def _of_levels(form: Form, y: Tensor, frozen: Arrays | None) -> dict[str, Tensor]:
    """Take out the mean of a group, if there is one; round to levels, choose the scale."""
    y, out = centered(form, y, frozen)
    return out | rounded(form, y)


for _name in CODEBOOK_RULES:
    rule(_name)(_of_levels)


def rounded(form: Form, y: Tensor) -> dict[str, Tensor]:
    """Round vectors, made to have the mean square 1, to levels of a book; choose their scale."""
    book, root = Codebook(form.levels.values, form.levels.unit), math.sqrt(form.dim)
    energy = tree_sum(y.square())
    norm = cast(square_root(energy), torch.float32, "norm of a token")
    safe = torch.where(norm == 0, torch.ones_like(norm), norm)
    codes = codebooks.assign(y * (root / safe), book)
    scale = divide(norm, root)
    if form.rule != "l2":
        points = codebooks.lookup(codes, book)
        product = tree_sum(points * y)
        if form.rule == "ls":
            scale = product / tree_sum(points.square())
        else:
            scale = torch.where(product == 0, torch.zeros_like(product), energy / product)
    return {"codes": codes, "scale": half(scale, "scale of a token")}


@lru_cache(maxsize=64)
def book_limit(levels: Levels, dim: int, choice: str) -> float:
    """Return up to which magnitude no scale of rotated vectors is beyond fp16.

    A level is at least `share` of what is rounded to it, and at least the least level.
    """
    if choice == "l2":
        return 0.9 * HALF_MAX
    book = torch.tensor(levels.values, dtype=torch.float32, device="cpu") * levels.unit
    positive = book[len(book) // 2 :]
    ends = [*((positive[1:] + positive[:-1]) / 2).tolist(), math.sqrt(dim)]
    share = min(level / end for level, end in zip(positive.tolist(), ends, strict=True))
    least = float(positive[0]) / (math.sqrt(dim) if choice == "unbiased" else 1)
    growth: float = 1 / max(share, least)
    return 0.9 * HALF_MAX / growth
