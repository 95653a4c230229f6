"""Zeros, and numbers per channel and group of tokens, by integer products, interpreted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from encode_compare import codec_of
from fast_parts import CPU, decode_calls, error

from kvpact.contract import AttendConfig
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.triton import attend, fast, token_groups
from kvpact.kernels.triton.fast import digits_reason, fast_of
from kvpact.kernels.triton.forms import slots_of
from kvpact.testing.backend import unwritten_is_nan

BOUND = 5e-4
"""Of the norm of the output: digits have 14 to 16 bits."""
QUICK = (
    "kivi:bits=4",
    "kivi:bits=2",
    "int:bits=4,zero=true",
    "turboquant:bits=3,center=64",
    "kvarn:bits=4",
)
SLOW = (
    *(f"kivi:bits={bits},group={group}" for bits in (2, 4, 8) for group in (32, 64, 128)),
    *(f"kvarn:bits={bits},group={group}" for bits in (2, 4, 8) for group in (32, 64, 128)),
    *(f"{method}:bits=3,group=128" for method in ("kivi", "kvarn")),
    *(f"turboquant:bits={bits},center={group}" for bits in (2, 3, 4) for group in (64, 128)),
    "int:bits=8,zero=true",
    "int:bits=2,group=64,zero=true",
    "int:bits=3,group=128,zero=true/int:bits=3,group=32,zero=true",
    "int:bits=4,group=1024,zero=true,rotate=true",
    "kivi:bits=4/kivi:bits=2",
    "kivi:bits=2/kvarn:bits=4,group=32",
    "kvarn:bits=2,group=128/kivi:bits=3",
    "int:bits=8/kivi:bits=8",
    "turboquant:bits=2,center=64/turboquant:bits=3",
)


@pytest.mark.parametrize("spec", (*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)))
def test_formats(monkeypatch, spec):
    assert error(decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128)), parts=2) < BOUND


@pytest.mark.parametrize(
    "spec",
    (
        "kivi:bits=2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in (*QUICK[:1], *QUICK[2:], *SLOW)),
    ),
)
def test_the_order_of_older_versions(monkeypatch, spec):
    calls = decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128))
    assert error(calls, parts=2, kw=8) < BOUND


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        pytest.param(
            spec, page, marks=[] if (spec, page) == ("kivi:bits=4", 32) else pytest.mark.slow
        )
        for spec, page in itertools.product(
            ("kivi:bits=4", "kivi:bits=2", "kvarn:bits=2,group=32"), (32, 64, 128)
        )
    ],
)
def test_pages(monkeypatch, spec, page):
    calls = decode_calls(monkeypatch, spec, 270, (2, 1, 2, 1, 64), page=page)
    assert len(calls) == 2
    assert error(calls, parts=2) < BOUND


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        ("kivi:bits=4", 80),
        ("kvarn:bits=2", 64),
        *(
            pytest.param(spec, dim, marks=pytest.mark.slow)
            for spec, dim in itertools.product(
                ("kivi:bits=2", "kvarn:bits=3,group=128"), (40, 64, 96, 256)
            )
        ),
        pytest.param("int:bits=4,zero=true", 80, marks=pytest.mark.slow),
        pytest.param("turboquant:bits=4,center=64", 96, marks=pytest.mark.slow),
    ],
)
def test_widths(monkeypatch, spec, dim):
    assert error(decode_calls(monkeypatch, spec, 200, (1, 1, 2, 1, dim))) < BOUND


@pytest.mark.parametrize(
    ("groups", "queries"),
    ((3, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((8, 1), (2, 4)))),
)
def test_rows(monkeypatch, groups, queries):
    calls = decode_calls(monkeypatch, "int:bits=4,zero=true", 200, (1, 2, groups, queries, 64))
    assert error(calls) < BOUND


@pytest.mark.parametrize("options", (",sinks=0,window=0", ",sinks=7,window=33"))
def test_exact_tokens_are_left_out(monkeypatch, options):
    calls = decode_calls(monkeypatch, f"kivi:bits=4{options}", 203, (1, 1, 2, 1, 64))
    assert error(calls) < BOUND


def test_padding(monkeypatch):
    padding = torch.tensor([0, 37])
    calls = decode_calls(monkeypatch, "kvarn:bits=4", 200, (2, 1, 2, 1, 64), padding=padding)
    assert error(calls) < BOUND


def test_window_and_softcap(monkeypatch):
    config = AttendConfig(sliding_window=90, softcap=20.0)
    calls = decode_calls(monkeypatch, "kivi:bits=2", 300, (2, 1, 2, 2, 64), config)
    assert error(calls) < BOUND


def test_channels_of_unlike_size(monkeypatch):
    """An outlier channel takes no digits from scores: they are of each query's greatest product."""
    calls = decode_calls(monkeypatch, "kivi:bits=4", 300, (1, 1, 2, 1, 64))
    source = calls[0].view.k.source
    for segment in range(-(-calls[0].view.k.exact_from // source.segment_tokens)):
        for name in ("scale", "zero"):
            numbers = source.gather(name, segment, segment + 1)
            numbers[..., ::7].mul_(12)
            numbers[..., 1::7].div_(100)
    assert error(calls) < BOUND


@pytest.mark.slow
def test_beside_exact_tokens(monkeypatch):
    """The whole of attention, with slots that nobody wrote poisoned."""
    spec = "kivi:bits=4,sinks=3,window=5/int:bits=4,zero=true,sinks=2,window=9"
    calls = decode_calls(monkeypatch, spec, 150, (1, 2, 2, 1, 64))
    expected = TORCH.attend(calls, "full")
    monkeypatch.setattr(fast, "LEAST_TOKENS", 1)
    with unwritten_is_nan():
        found = attend.attend_triton(calls, "full")
    assert (found - expected).norm() < BOUND * expected.norm()


def test_another_order_is_wrong(monkeypatch):
    """Digits in the order of other versions make another result: the tests above can fail."""
    calls = decode_calls(monkeypatch, "kivi:bits=4", 200, (1, 1, 2, 1, 64))
    right = token_groups.in_key_order
    monkeypatch.setattr(token_groups, "in_key_order", lambda x, form, kw: right(x, form, 8))
    assert error(calls, kw=4) > 0.05


@pytest.mark.parametrize("spec", QUICK)
def test_long_pasts_are_attended_fast(monkeypatch, spec):
    calls = decode_calls(monkeypatch, spec, 700, (1, 1, 2, 1, 64))
    k, v = (slots_of(side.codec, i == 1, CPU) for i, side in enumerate(calls[0].view[:2]))
    assert fast_of(calls, k, v) is not None


def test_what_is_not_covered():
    def slots(spec):
        codecs = (codec_of(spec, side, 128, torch.float16) for side in "kv")
        return [slots_of(codec, i == 1, CPU) for i, codec in enumerate(codecs)]

    k, v = slots("kvarn:bits=4")
    assert digits_reason(k, v, 4) == ""
    assert "8 query rows" in digits_reason(k, v, 8)
    assert digits_reason(*slots("int:bits=4,zero=true"), 8) == ""
    assert "16 query rows" in digits_reason(*slots("int:bits=4,zero=true"), 16)
    uneven = k._replace(form=replace(k.form, group=96))
    assert "K has more to it" in digits_reason(uneven, v, 4)
    shifted = v._replace(form=replace(v.form, types=k.form.types))
    assert "V has more to it" in digits_reason(k, shifted, 4)
    assert digits_reason(*slots("kivi:bits=2"), 4) == ""
    assert "beside V of 3 bits" in digits_reason(*slots("kvarn:bits=3"), 4)
