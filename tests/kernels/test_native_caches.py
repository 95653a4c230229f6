"""Caches hold and show the same bytes with native kernels as with torch's."""

import itertools

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.cpu.library import _load
from kvpact.testing import random_offset, same_bytes

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

LAYOUTS = {"contiguous": {}, "paged": {"num_pages": 40, "page_size": 64}}
SPECS = (
    "turboquant:bits=4", "int:bits=8/kivi:bits=2", "fp8:sinks=0", "kvarn:bits=3,window=0",
    "kvarn:group=32",
)  # fmt: skip
LEARNING = (
    "trellis", "trellis:bits=3,sinks=4", "trellis:bits=4,center=0,window=5",
    "trellis:bits=3,center=128,sinks=9", "trellis:bits=2,center=0/int:bits=8",
)  # fmt: skip

EACH = (*itertools.product(SPECS, LAYOUTS), *((spec, "contiguous") for spec in LEARNING))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = [
    pytest.param(*one, dtype, marks=() if turn % 3 == place else pytest.mark.slow)
    for turn, one in enumerate(EACH)
    for place, dtype in enumerate(DTYPES)
]


def history(spec, kernel, dtype, layout, offsets=None):
    """Return what a cache shows, learns and holds: of rows with padding, in pieces, cut, forked."""
    generator = torch.Generator().manual_seed(4)
    geometry = CacheGeometry(1, 3, 64, None, dtype)
    options = {"key_offsets": offsets} if offsets else {}
    cache = create_cache(spec, geometry, layout, backend=kernel, **LAYOUTS[layout], **options)
    config, found = AttendConfig(padding=torch.tensor([0, 11])), []
    for count in (30, 1, 20, 90, *[1] * 60, 3, 140, 1):
        tokens = torch.randn(2, 12, count, 64, generator=generator).to(dtype)
        if count == 20:  # its queries are what keys learn their weights from
            cache.attend(0, k=tokens[:, :3], v=tokens[:, 3:6], q=tokens[:, 6:], config=config)
        else:
            result = cache.prefill(0, tokens[:, :3], tokens[:, 3:6], config=config)
        if count in (90, 140):
            found += [result.k, result.v]
            cache.truncate(cache.seq_len() - 10)
    found += [result.k, result.v]
    if layout == "contiguous":
        found += cache.entry(0).k.codec.state().values()
        found += [cache.dequantize(0, "k"), cache.fork().dequantize(0, "v")]
    return found, cache.stats()["compute"]


@pytest.mark.parametrize(("spec", "layout", "dtype"), CASES)
def test_caches_are_alike(spec, layout, dtype):
    offsets = {0: random_offset(3, 64, seed=3)} if dtype == torch.bfloat16 else None
    learning = spec in LEARNING
    kernel = "auto" if learning else "cpu"  # what keys learn from is encoded by torch
    (expected, _), (found, calls) = (
        history(spec, name, dtype, layout, offsets) for name in ("torch", kernel)
    )
    assert len(expected) == len(found) and all(map(same_bytes, expected, found))
    assert set(calls["decode"]) == {"cpu"} and calls["encode"]["cpu"] >= 4
    assert learning or set(calls["encode"]) == {"cpu"}
    assert calls.get("learn", {}) == ({"cpu": 1} if learning else {})


@pytest.mark.parametrize(("spec", "codec"), (
    ("lowrank:rank=8", "LowRankCodec"),
    ("qjl", "SignCodec"),
    ("polarquant", "PolarCodec"),
    ("turboquant:bits=3,mode=prod", "TurboQuantCodec"),
))  # fmt: skip
def test_what_is_not_native_is_torch_and_says_why(spec, codec):
    k, v = torch.randn(2, 1, 2, 128, 64, generator=torch.Generator().manual_seed(6))
    cache = create_cache(f"{spec}/turboquant:bits=4", CacheGeometry(1, 2, 64, None, torch.float32))
    cache.prefill(0, k, v)
    for side in "kv":
        cache.dequantize(0, side)
    stats = cache.stats()["compute"]
    assert stats["encode"] == stats["decode"] == {"torch": 1, "cpu": 1}
    assert stats["reasons"]["encode: torch"] == f"cpu: no native encoding for {codec}"
    assert stats["reasons"]["decode: torch"] == f"cpu: no native format for {codec}"


@pytest.mark.parametrize("spec", ["int:bits=8", "turboquant:bits=3", "kivi:bits=2"])
def test_sinks_that_are_in_the_tail_count_once(spec):
    """A padded row begins among the tokens that are exact in all rows, its sinks with it."""
    geometry, padding = CacheGeometry(1, 2, 32, dtype=torch.float32), torch.tensor([0, 90])
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 2, 101, 32, generator=generator)
    q, found = torch.randn(2, 4, 101, 32, generator=generator), []
    for backend in ("cpu", "torch"):
        cache = create_cache(f"{spec},window=40,sinks=4", geometry, backend=backend)
        for part in (slice(0, 100), slice(100, 101)):
            given = {"k": k[:, :, part], "v": v[:, :, part], "q": q[:, :, part]}
            output = cache.attend(0, **given, config=AttendConfig(padding=padding))
        found.append(output)
    torch.testing.assert_close(*found, atol=1e-3, rtol=0)
