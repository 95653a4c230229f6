"""Attention over trellis codes is the torch body's, and decoding gives its numbers to the bit."""

from functools import partial

import pytest
import torch
from compare import latents, same
from decode_compare import decoded
from encode_compare import codec_of
from matrix import LEARNT, TRELLISES, UNTREATED
from simd_levels import at_level, levels

from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

SPECS = (
    *dict.fromkeys((*TRELLISES, *LEARNT)),
    f"trellis:bits=3,states=8,{UNTREATED}",
    "trellis:bits=4,center=128,states=8",
)
CACHES = (
    *SPECS, "trellis:bits=4,window=0,sinks=0", "turboquant:bits=4/trellis:bits=3,window=17",
    "trellis:bits=3,sinks=0/kivi:bits=4",
)  # fmt: skip
PLAIN = TRELLISES[:6]
# Whoever encodes: attention is what is compared.
attended = partial(same, backend="auto", heads=1, held=200)


@pytest.mark.parametrize("level", levels())
def test_every_level(level):
    with at_level(level):
        for spec in SPECS:
            for side, dim in (("k", 32), ("k", 64), ("v", 64)):
                assert decoded(spec, side, dim) == "", (spec, side, dim)
        for many in (32, 1):
            for spec in CACHES:
                attended(spec=spec, heads=2, many=many)
            for dim in (32, 96, 128):
                for spec in ("trellis:bits=4", "trellis:bits=3"):
                    attended(spec=spec, dim=dim, many=many)
            for groups in (1, 2, 4, 5, 8):
                for spec in ("trellis:bits=2", PLAIN[3]):
                    attended(spec=spec, groups=groups, held=97 + groups, many=many)
            attended(spec="trellis:bits=4", new=5, sliding_window=70, many=many)
        for spec in ("trellis:bits=4", "trellis:bits=3", PLAIN[2]):
            attended(latents, spec=spec)


def test_values_of_every_width():
    for bits in (1, 3, 4, 6):
        for dim in (8, 9, 20, 33, 100):
            assert decoded(f"trellis:bits={bits}", "v", dim) == "", (bits, dim)


def test_narrow_words_of_keys():
    """Words that begin and end with the same few steps."""
    for bits in (4, 5, 6):
        for dim in (16, 24, 48, 80):
            assert decoded(f"trellis:bits={bits},{UNTREATED}", "k", dim) == "", (bits, dim)


@pytest.mark.parametrize("dim", (16, 24, 32, 96, 128))
def test_attention_at_every_width(dim):
    for bits in (4, 5):
        attended(spec=f"trellis:bits={bits},{UNTREATED}", dim=dim, value_dim=dim + 4)
        if dim % 16 == 0:
            attended(spec=f"trellis:bits={bits - 1}", dim=dim, groups=1, held=129)


@pytest.mark.parametrize("spec", ("trellis:bits=4", PLAIN[2]))
def test_rules_pages_and_latents(spec):
    attended(spec=spec, new=3, sliding_window=70, softcap=2.0, dim=32)
    attended(spec=spec, batch=3, padding=torch.tensor([0, 5, 140]), dim=32)
    if spec in PLAIN:  # paged caches want codecs that have learnt
        attended(spec=spec, layout="paged", batch=2, dim=32)
    attended(latents, spec=spec, dim=64, value_dim=16)


@pytest.mark.parametrize(
    ("spec", "side", "dim"),
    ((f"trellis:bits=2,{UNTREATED}", "k", 40), ("trellis:bits=4", "k", 20), ("trellis", "v", 7)),
)
def test_widths_that_are_torchs(spec, side, dim):
    for operation in ("attend", "decode"):
        reason = CPU.covers(operation, codec_of(spec, side, dim, torch.float32), torch.float32)
        assert "channels" in reason
