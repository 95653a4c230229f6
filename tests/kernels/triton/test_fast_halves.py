"""Attention over numbers of fp8 by products of fp16, interpreted, beside the torch body."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fast_parts import CPU, decode_calls, error

from kvpact.kernels.triton import key_scores
from kvpact.kernels.triton.fast import fast_of
from kvpact.kernels.triton.forms import slots_of
from kvpact.quantizers.numbers import FP8, from_fp8

BOUND = 2e-6
"""Of the norm of the output: sums of fp16 products in fp32."""
MIXED = ("fp8/turboquant:bits=2", "turboquant:bits=4/fp8", "kivi:bits=4/fp8:format=e5m2")


@pytest.mark.parametrize("kw", (4, 8))
@pytest.mark.parametrize("spec", ("fp8", "fp8:format=e5m2,scale=none"))
def test_formats(monkeypatch, spec, kw):
    calls = decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128))
    assert error(calls, parts=2, kw=kw) < BOUND


@pytest.mark.parametrize("kw", (4, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize(
    "spec", (MIXED[0], *(pytest.param(x, marks=pytest.mark.slow) for x in MIXED[1:]))
)
def test_beside_levels(monkeypatch, spec, kw):
    calls = decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128))
    assert error(calls, parts=2, kw=kw) < 5e-4


@pytest.mark.parametrize(
    ("shape", "page"),
    (
        ((2, 1, 2, 1, 80), 32),
        pytest.param((1, 1, 8, 2, 64), 64, marks=pytest.mark.slow),
        pytest.param((1, 2, 3, 1, 256), 128, marks=pytest.mark.slow),
    ),
)
def test_pages_and_widths(monkeypatch, shape, page):
    assert error(decode_calls(monkeypatch, "fp8", 200, shape, page=page)) < BOUND


@pytest.mark.parametrize("kind", sorted(FP8))
def test_all_numbers(monkeypatch, kind):
    """Each byte that is a finite number: subnormal ones and zeros of both signs are, too."""
    calls = decode_calls(monkeypatch, f"fp8:format={kind}", 300, (1, 1, 2, 1, 64))
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[from_fp8(every, kind).isfinite()]
    for stream in calls[0].view[:2]:
        for segment in range(-(-stream.exact_from // stream.source.segment_tokens)):
            codes = stream.source.gather("codes", segment, segment + 1)
            generator = torch.Generator().manual_seed(segment)
            codes.copy_(finite[torch.randint(len(finite), codes.shape, generator=generator)])
            scale = stream.source.gather("scale", segment, segment + 1)
            scale.fill_(2.0**-6 if kind == "e4m3" else 2.0**-13)
    assert error(calls) < BOUND


def test_another_order_is_wrong(monkeypatch):
    """Queries in the order of other versions make another result: the tests above can fail."""
    calls = decode_calls(monkeypatch, "fp8", 200, (1, 1, 2, 1, 64))
    right = key_scores.key_channels
    monkeypatch.setattr(key_scores, "key_channels", lambda count, kw: right(count, 8))
    assert error(calls, kw=4) > 0.05


def test_long_pasts_are_attended_fast(monkeypatch):
    calls = decode_calls(monkeypatch, "fp8", 700, (1, 1, 2, 1, 64))
    k, v = (slots_of(side.codec, i == 1, CPU) for i, side in enumerate(calls[0].view[:2]))
    assert fast_of(calls, k, v) is not None
