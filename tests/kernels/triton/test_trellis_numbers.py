"""The numbers that kernels make of trellis codes are those of the codec, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from encode_compare import _PLAIN, TRELLISES, codec_of, random_pieces, torch_slots
from forms import one_per_form

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvpact.kernels.triton.forms import slots_of
from kvpact.kernels.triton.trellis.numbers import trellis_numbers
from kvpact.kernels.triton.trellis.steps import steps_of
from kvpact.methods.trellis_codec import places

WIDTHS = (64, 80, 128, 96)


@triton.jit
def numbers_of_tiles(codes, scale, LEVELS, OUT, FORM: tl.constexpr):
    """Store the numbers of a tile of a segment; OUT `[tokens, FORM.padded]`."""
    tile = tl.program_id(0)
    token, channel = tile * 32 + tl.arange(0, 32), tl.arange(0, FORM.padded)
    numbers = trellis_numbers(codes, scale, LEVELS, tile, tl.arange(0, FORM.padded), FORM)
    tl.store(OUT + (token * FORM.padded)[:, None] + channel[None, :], numbers)


def differing(spec: str, side: str, dim: int, tokens: int = 64) -> int:
    """Return how many numbers of two tiles differ, among them those behind the last channel."""
    (x,), _ = random_pieces(spec, side, dim, tokens, 0, torch.float32)
    x[:, :, 3] = 0  # a scale of 0
    codec = codec_of(spec, side, dim, torch.float32)
    (segment, *_) = torch_slots(codec, x[:1, :1], 0)
    arrays = {field.name: field.read(segment[field.name]) for field in codec.fields[:2]}
    slots = slots_of(codec, side == "v", x.device)
    expected = torch.zeros(64, slots.form.padded)
    # What is decoded before K's treatment is undone.
    vectors = getattr(codec, "_vectors", codec)
    expected[:, : slots.form.dim] = vectors.decode(arrays)[0, 0, :64]
    found = torch.full_like(expected, torch.nan)
    numbers_of_tiles[(2,)](segment["codes"], segment["scale"], slots.levels, found, slots.form)
    return int((found.view(torch.int32) != expected.view(torch.int32)).sum())


@pytest.mark.parametrize(
    ("spec", "dim"), one_per_form(zip(TRELLISES, itertools.cycle(WIDTHS), strict=False))
)
def test_keys(spec, dim):
    assert differing(spec, "k", dim) == 0


@pytest.mark.parametrize("dim", (33, 64))
@pytest.mark.parametrize("spec", one_per_form(spec for spec in TRELLISES if _PLAIN in spec))
def test_values(spec, dim):
    assert differing(spec, "v", dim) == 0


@pytest.mark.parametrize(("bits", "dim"), ((2, 40), (4, 16), (5, 24), (1, 8)))
def test_words_of_keys_that_are_few_or_not_full(bits, dim):
    assert differing(f"trellis:bits={bits},{_PLAIN}", "k", dim) == 0


@pytest.mark.parametrize("spec", ("trellis:bits=1", "trellis:bits=4", f"trellis:bits=3,{_PLAIN}"))
def test_where_codes_lie(spec):
    """Every bit of a token's words belongs to one plane of one step, and only one."""
    codec = codec_of(spec, "k", 128, torch.float32)
    form = codec.form
    used: list[int] = []
    for block in steps_of(form, by_token=True):
        order = places(block.dim, block.bits, form.interleave, torch.device("cpu")).argsort()
        for plane in (block.low, block.high):
            items = plane.before + order
            used += (plane.row * 32 + items * plane.width).tolist() if plane.width else []
    assert len(set(used)) == len(used) and max(used) < 32 * codec.fields[0].shape[1]
