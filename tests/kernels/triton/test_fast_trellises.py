"""Attention over trellises by integer products, interpreted, beside the torch body."""

import pytest
import torch

pytest.importorskip("triton")

from encode_compare import _PLAIN
from fast_parts import CPU, decode_calls, error
from forms import slow

from kvpact.contract import AttendConfig
from kvpact.kernels.triton.digits.fast import digits_reason
from kvpact.kernels.triton.forms import slots_of
from kvpact.spec import parse_spec

BOUND = 5e-4
"""Of the norm of the output: queries and weights have 14 bits."""


@pytest.mark.parametrize(("spec", "dim"), [
    ("trellis:bits=4", 128),
    ("trellis:bits=2", 64),
    (f"trellis:bits=6,{_PLAIN}", 32),
    ("trellis:bits=3,blocks=false,center=0/trellis:bits=1", 64),
    *slow(
        *(
            (f"trellis:bits={bits}{options}", dim)
            for bits in range(1, 7)
            for options in ("", f",{_PLAIN}", ",center=128,states=8", ",first=false")
            for dim in (64, 128, 256)
        )
    ),
])  # fmt: skip
def test_formats(monkeypatch, spec, dim):
    assert error(decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, dim)), parts=2) < BOUND


@pytest.mark.parametrize(("spec", "dim"), [
    ("trellis:bits=4", 64),
    (f"trellis:bits=2,{_PLAIN}", 64),
    *slow(
        *(
            (f"trellis:bits={bits}{options}", dim)
            for bits in range(1, 7)
            for options in ("", f",{_PLAIN}")
            for dim in (64, 128)
        )
    ),
])  # fmt: skip
def test_order_of_operands_of_older_compilers(monkeypatch, spec, dim):
    calls = decode_calls(monkeypatch, spec, 150, (1, 1, 4, 1, dim))
    assert error(calls, parts=1, kw=8) < BOUND


@pytest.mark.parametrize(("shape", "config", "padding"), [
    ((1, 2, 3, 2, 64), AttendConfig(softcap=2.0, sliding_window=150), None),
    *slow(((3, 1, 2, 1, 64), None, torch.tensor([0, 37, 150]))),
])  # fmt: skip
def test_rows_rules_and_padding(monkeypatch, shape, config, padding):
    spec = "trellis:bits=3,window=33"
    calls = decode_calls(monkeypatch, spec, 230, shape, config, padding)
    assert error(calls) < BOUND


def test_pages(monkeypatch):
    calls = decode_calls(monkeypatch, f"trellis:bits=3,{_PLAIN}", 200, (2, 1, 2, 1, 64), page=32)
    assert len(calls) == 2 and error(calls) < BOUND


@pytest.mark.parametrize(("spec", "dim", "reason"), [
    ("trellis:bits=4", 80, "trellises of 80 channels"),
    ("trellis:bits=4", 512, "trellises of 512 channels"),
    ("trellis:bits=4/turboquant:bits=4", 64, "no trellis"),
    ("int:bits=4/trellis:bits=4", 64, "no trellis"),
    ("trellis:bits=4", 64, ""),
])  # fmt: skip
def test_what_is_covered(spec, dim, reason):
    parsed = parse_spec(spec)
    k = slots_of(parsed.key.key_codec(dim, torch.float32), CPU)
    v = slots_of(parsed.value.value_codec(dim, torch.float32), CPU)
    assert digits_reason(k, v, 4) == reason
    assert "17 query rows" in digits_reason(k, v, 17)
