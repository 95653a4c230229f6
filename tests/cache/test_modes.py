"""What a program sets for all of torch: a default dtype and a default device."""

import pytest
import torch

from kvpact import KeyOffset, create_cache
from kvpact.compressor import KVCacheCompressor
from kvpact.kernels.cpu.library import _load
from kvpact.testing import random_offset, random_tokens, same_bytes
from kvpact.testing.cache import Mode, ModeChecks

BACKENDS = ("torch",) if isinstance(_load(), str) else ("torch", "cpu")
HALF = Mode(torch.bfloat16, "meta")


@pytest.mark.parametrize(("spec", "backend"), [
    *((spec, name) for spec in ("trellis:bits=4", "kivi:bits=2", "none") for name in BACKENDS),
    *((spec, "torch") for spec in ("lowrank:rank=8", "hybrid:rank=16", "vq:codebook_size=16")),
    ("pca:bits=1.5", "auto"),
])  # fmt: skip
def test_caches_whose_codecs_learn_from_their_first_tokens(spec, backend):
    class Kit(ModeChecks):
        def groups(self):
            return 150, 150  # a prompt that is long enough to learn from

        def make_cache(self, geometry, max_tokens=None):
            offsets = {0: random_offset(2, 32)} if backend != "auto" else None
            return create_cache(spec, geometry, backend=backend, key_offsets=offsets)

    Kit().test_what_a_program_sets_for_torch()


def test_an_offset_has_the_same_numbers():
    """Floats are not rounded to the default dtype on their way into a model's offset."""
    known = random_offset(2, 32)
    numbers = (known.frequencies, known.channels, known.bias)
    with HALF.set():
        made = KeyOffset(*numbers, scaling=known.scaling)
        taken = KeyOffset.from_bias([[3.1, 0.2] * 16], [0.123456789, 0.3])
    assert made.digest == known.digest
    assert taken.digest == KeyOffset.from_bias([[3.1, 0.2] * 16], [0.123456789, 0.3]).digest


@pytest.mark.parametrize("spec", ["trellis:bits=4", "turboquant:bits=4", "kivi:bits=2"])
def test_compressed_tokens_are_the_same(spec):
    k, v = (random_tokens(1, 2, 150, 32, seed=seed) for seed in range(2))
    expected = KVCacheCompressor(spec).compress_kv(k, v)
    with HALF.set():
        found = KVCacheCompressor(spec).compress_kv(k, v)
        shown = found.decompress()
        assert found.to_bytes() == expected.to_bytes()
    assert all(same_bytes(x, y) for x, y in zip(shown, expected.decompress(), strict=True))
