"""The bytes of a slot, format by format, as literal numbers: they change with the format alone."""

import pytest
import torch

import kvpact
from kvpact.cache import bytes_per_token


# Spec, head_dim, bytes of a K slot, bytes of a V slot (one token, one head).
@pytest.mark.parametrize(("text", "dim", "key", "value"), [
    ("turboquant:bits=1", 128, 18, 18), ("turboquant:bits=2", 128, 34, 34),
    ("turboquant:bits=3", 128, 50, 50), ("turboquant:bits=4", 128, 66, 66),
    ("turboquant:bits=5", 128, 82, 82), ("turboquant:bits=6", 128, 98, 98),
    ("turboquant:bits=7", 128, 114, 114), ("turboquant:bits=8", 128, 130, 130),
    ("turboquant:bits=3", 64, 26, 26), ("turboquant:bits=4", 64, 34, 34),
    ("turboquant:bits=4", 576, 290, 290),
    # 80 channels of one token in planes of whole words: 5 words of 2 bits, 3 (not 2.5) of 1 bit.
    ("turboquant:bits=3", 80, 34, 32), ("turboquant:bits=4", 80, 42, 42),
    ("turboquant:bits=2,center=64", 128, 38, 34), ("turboquant:bits=2,center=128", 128, 36, 34),
    ("turboquant:bits=3,mode=prod", 128, 52, 50), ("turboquant:bits=4,mode=prod", 128, 68, 66),
    ("turboquant:bits=4,mode=prod,center=64", 64, 38, 34), ("pqo3", 128, 50, 50),
    ("tq3", 128, 52, 50), ("pqo4", 128, 66, 66), ("tq4", 128, 68, 66), ("q8_0", 128, 136, 136),
    ("q4_0", 128, 72, 72), ("int:bits=8", 80, 86, 86), ("int:bits=4,zero=true", 128, 80, 80),
    ("int:bits=3", 64, 28, 28), ("int:bits=2", 64, 20, 20), ("int:bits=4,group=64", 64, 34, 34),
    ("int:bits=4,group=128", 80, 42, 42), ("kivi:bits=2", 128, 48, 48),
    ("kivi:bits=4,group=64", 64, 36, 36), ("kivi:bits=2,group=128", 80, 22.5, 24),
    ("kvarn:bits=4", 64, 38, 38), ("kvarn:bits=3", 128, 58, 56),
    ("kvarn:bits=2,group=128", 128, 38, 38), ("polarquant", 128, 62, 62),
    ("polarquant", 64, 31, 31), ("polarquant", 80, 38.75, 38.75),
    # 36 angles of 4 bits, 18 + 9 + 4 of 2 bits, 4 radii of 16 channels and one of 8.
    ("polarquant", 72, 35.75, 35.75), ("polarquant:levels=3,first=5", 64, 42, 42),
    ("qjl", 128, 34, 48), ("qjl:sketch=1,value_bits=4,value_group=64", 64, 10, 36),
    # 240 signs of a token in whole words.
    ("qjl:sketch=3", 80, 34, 32), ("fp8", 128, 130, 130),
    ("fp8:format=e5m2,scale=none", 80, 80, 80), ("fp8_e4m3", 128, 128, 128), ("none", 64, 128, 128),
    ("none:dtype=fp32", 64, 256, 256), ("int:bits=8/turboquant:bits=3", 128, 136, 50),
])  # fmt: skip
def test_bytes_of_a_slot(text, dim, key, value):
    spec = kvpact.parse_spec(text)
    geometry = kvpact.CacheGeometry(1, 3, dim)
    assert bytes_per_token(spec, geometry) == {"key_bytes": 3 * key, "value_bytes": 3 * value}
    cache = kvpact.create_cache(spec.with_options(sinks=0, window=0), geometry)
    x = torch.randn(1, 3, 128, dim, generator=torch.Generator().manual_seed(dim)).half()
    cache.prefill(0, x, x)
    sizes = cache.stats()["bytes"]
    assert sizes["codes"] + sizes["side"] == 128 * 3 * (key + value)
    assert cache.memory_usage() == sizes["total"] == 128 * 3 * (key + value)
