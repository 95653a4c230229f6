"""Products of treated queries and stored numbers, and of bases, are those of decoded keys."""

import itertools

import pytest
import torch
from encode_compare import TRELLISES, codec_of, torch_slots, treated_pieces
from forms import one_per_form

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvpact.kernels.triton.forms import slots_of
from kvpact.kernels.triton.trellis.numbers import base_logits, trellis_numbers
from kvpact.kernels.triton.trellis.queries import packed_queries
from kvpact.methods.trellis_learning import TreatedKeys

ROWS, TOKENS = 4, 128
BOUND = 1e-6


@triton.jit
def logits_of_tiles(
    codes, scale, flags, mean, step, LEVELS, QP, QE, FIRST, OUT, FORM: tl.constexpr
):
    """Store the logits of a tile of a segment; QP, QE `[4, dim]`, OUT `[4, 128]`."""
    tile, row = tl.program_id(0), tl.arange(0, 4)
    token, channel = tl.arange(0, 32), tl.arange(0, FORM.padded)
    at = (row * FORM.dim)[:, None] + channel[None, :]
    live = tl.broadcast_to((channel < FORM.dim)[None, :], at.shape)
    packed, exact = tl.load(QP + at, mask=live, other=0.0), tl.load(QE + at, mask=live, other=0.0)
    numbers = trellis_numbers(codes, scale, LEVELS, tile, channel, FORM)
    logits = tl.sum(packed[:, None, :] * numbers[None, :, :], 2)
    if FORM.has("base"):
        first = tl.load(FIRST + row)
        logits += base_logits(flags, mean, step, exact, first, tile, channel, FORM)
    tl.store(OUT + (row * 128)[:, None] + (tile * 32 + token)[None, :], logits)


def case(spec: str, dim: int) -> tuple[torch.Tensor, torch.Tensor, TreatedKeys]:
    """Return the logits expected and found, of the second head of the second row."""
    (x,), _ = treated_pieces(spec, "k", dim, TOKENS, 0, torch.float32)
    codec = codec_of(spec, "k", dim, torch.float32)
    (segment,) = torch_slots(codec, x, 0)
    arrays = {field.name: field.read(segment[field.name]) for field in codec.fields}
    rows = torch.randn(2, 3, ROWS, dim, generator=torch.Generator().manual_seed(3))
    expected = rows @ codec.transform.inverse(codec.decode(arrays)).mT
    packed, first = packed_queries(codec, rows)
    first = torch.zeros(2, 3, ROWS) if first is None else first
    found = torch.full((ROWS, TOKENS), torch.nan)
    slots = slots_of(codec, x.device)
    parts, names = slots.form.parts, ("codes", "scale", "base", "mean", "step")
    fields = [segment[parts.get(name, parts["codes"]).name][1, 1] for name in names]
    logits_of_tiles[(TOKENS // 32,)](
        *fields, slots.levels, packed[1, 1], rows[1, 1], first[1, 1], found, slots.form
    )
    return expected[1, 1], found, codec


@pytest.mark.parametrize(
    ("spec", "dim"), one_per_form(zip(TRELLISES[5:], itertools.cycle((64, 80, 128)), strict=False))
)
def test_logits(spec, dim):
    expected, found, _ = case(spec, dim)
    assert (found - expected).norm() / expected.norm() <= BOUND


def test_tokens_choose_unlike_bases():
    """Otherwise the test above would not tell bases from each other."""
    (x,), _ = treated_pieces("trellis:bits=4", "k", 64, TOKENS, 0, torch.float32)
    codec = codec_of("trellis:bits=4", "k", 64, torch.float32)
    assert codec.encode(x)["base"].unique().tolist() == [0, 1, 2]


def test_nothing_is_stored_before_a_codec_has_learnt():
    codec, rows = codec_of("trellis:bits=4", "k", 64, torch.float32), torch.ones(1, 2, 3, 64)
    queries, first = packed_queries(codec, rows)
    assert queries is rows and first is None
