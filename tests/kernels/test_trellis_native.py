"""Attention over trellis codes is the torch body's, and decoding gives its numbers to the bit."""

from __future__ import annotations

import pytest
import torch
from compare import BOUND, check_guards, error, guarded_output
from encode_compare import codec_of
from simd_levels import at_level, levels
from trellis_compare import (
    CACHES,
    FORMATS,
    PLAIN,
    TREATED,
    UNTREATED,
    both,
    cases,
    decoded,
    latents,
)

from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    monkeypatch.setattr(native, "new_output", guarded_output)


def same(**case):
    expected, found, calls = both(**case)
    assert calls == {"cpu": 1}
    check_guards()
    assert error(expected, found) <= BOUND


@pytest.mark.parametrize("spec", FORMATS)
def test_decoding_to_the_bit(spec):
    for dim in (32, 64):
        assert decoded(spec, "k", dim) == ""
        assert decoded(spec, "v", dim) == ""


@pytest.mark.parametrize("dim", (8, 9, 20, 33, 100))
@pytest.mark.parametrize("bits", (1, 3, 4, 6))
def test_values_of_every_width(bits, dim):
    assert decoded(f"trellis:bits={bits}", "v", dim) == ""


@pytest.mark.parametrize("dim", (16, 24, 48, 80))
def test_narrow_words_of_keys(dim):
    """Words that begin and end with the same few steps."""
    for bits in (4, 5, 6):
        assert decoded(f"trellis:bits={bits},{UNTREATED}", "k", dim) == ""


@pytest.mark.parametrize("spec", CACHES)
def test_attention(spec, monkeypatch):
    same(spec=spec, heads=2)
    monkeypatch.setattr(native, "MANY_ROWS", 1)
    same(spec=spec, seed=1)


@pytest.mark.parametrize("dim", (16, 24, 32, 96, 128))
@pytest.mark.parametrize("bits", (4, 5))
def test_attention_at_every_width(bits, dim):
    same(spec=f"trellis:bits={bits},{UNTREATED}", dim=dim, value_dim=dim + 4)
    if dim % 16 == 0:
        same(spec=f"trellis:bits={bits - 1}", dim=dim, groups=1, held=129)


@pytest.mark.parametrize("groups", (1, 2, 4, 5, 8))
@pytest.mark.parametrize("spec", ("trellis:bits=2", "trellis:bits=5", PLAIN[3]))
def test_every_number_of_query_heads(spec, groups):
    same(spec=spec, groups=groups, held=97 + groups, batch=2)


@pytest.mark.parametrize("spec", ("trellis:bits=4", PLAIN[2]))
def test_rules_pages_and_latents(spec, monkeypatch):
    same(spec=spec, new=3, sliding_window=70, softcap=2.0, dim=32)
    same(spec=spec, batch=3, padding=torch.tensor([0, 5, 140]), dim=32)
    if spec in PLAIN:  # paged caches want codecs that have learnt
        expected, found, calls = both(spec, layout="paged", batch=2, held=200, dim=32)
        assert calls == {"cpu": 2} and error(expected, found) <= BOUND
    expected, found, calls = latents(spec, rank=64, rope=16, held=200)
    assert calls == {"cpu": 1} and error(expected, found) <= BOUND


@pytest.mark.parametrize(
    ("spec", "side", "dim"),
    ((f"trellis:bits=2,{UNTREATED}", "k", 40), ("trellis:bits=4", "k", 20), ("trellis", "v", 7)),
)
def test_widths_that_are_torchs(spec, side, dim):
    for operation in ("attend", "decode"):
        reason = CPU.covers(operation, codec_of(spec, side, dim, torch.float32), torch.float32)
        assert "channels" in reason


@pytest.mark.skipif(
    isinstance(_load(), str) or "avx512" not in library().levels, reason="int8 needs AVX-512 VNNI"
)
@pytest.mark.parametrize("spec", ("trellis:bits=4", "trellis:bits=3", PLAIN[1], PLAIN[5]))
@pytest.mark.parametrize("shape", ((1, 64), (3, 80), (4, 128), (8, 32), (6, 256)))
def test_integers_of_8_bits_add_one_percent(spec, shape):
    groups, dim = shape
    case = {"spec": f"{spec},window=0,sinks=0", "groups": groups, "dim": dim, "held": 300}
    expected, found, calls = both(**case, precision="int8")
    assert calls == {"cpu": 1}
    check_guards()
    assert 1e-4 < error(expected, found) < 0.02


@pytest.mark.parametrize("level", levels())
def test_every_level(level):
    told = at_level(level, "trellis_compare.py")
    assert told["cases"] == 2 * len(cases()) + 2
    assert told["bad"] == [] and told["worst"] <= BOUND
    assert set(TREATED) <= set(CACHES)
