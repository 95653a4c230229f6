"""Treated keys of `trellis` decoded by the Triton kernel: the torch body's numbers, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from decode_compare import compare_slots, packed
from encode_compare import _PLAIN, DTYPES, TRELLISES, treated_pieces

pytest.importorskip("triton")

from kvpact.kernels.triton.decode.decode import decode_triton

TREATED = [spec for spec in TRELLISES if _PLAIN not in spec]
QUICK = (TREATED[0], TREATED[3], "trellis:bits=2,weights=false,blocks=false,first=false")


def difference(spec: str, dim: int, start: int, end: int, dtype: torch.dtype) -> str:
    (x,), _ = treated_pieces(spec, "k", dim, 128, 0, torch.float32)
    codec, store = packed(spec, "k", x[:1])
    return compare_slots(codec, store, start, end, dtype, True, decode_triton)


@pytest.mark.parametrize(
    ("spec", "dim", "dtype"), list(zip(QUICK, (64, 80, 128), DTYPES, strict=True))
)
def test_treated_keys(spec, dim, dtype):
    assert difference(spec, dim, 20, 60, dtype) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dim"), list(zip(TREATED, itertools.cycle((96, 128, 64, 20, 256, 80)), strict=False))
)
def test_every_treatment_and_width(spec, dim):
    for (start, end), dtype in itertools.product(((0, 1), (31, 128)), DTYPES):
        assert difference(spec, dim, start, end, dtype) == ""
