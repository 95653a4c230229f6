"""Calls of a cache as operators of torch: compiled without a break, each carried out once."""

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.cache.operators import operator_number
from kvpact.errors import KVPactError

GEOMETRY = CacheGeometry(2, 2, 64, dtype=torch.float32)


def two_layers(cache, k, v, q):
    x = torch.ops.kvpact.attend(cache, 0, k=k, v=v, q=q)
    torch.ops.kvpact.attend(cache, 1, k=k, v=v, q=q)  # its result is not used, its tokens are
    return torch.ops.kvpact.attend(
        cache, 1, k=k * 2, v=v, q=q + x, softmax_scale=0.2, sliding_window=5
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_program_has_no_break_and_the_same_results(backend):
    generator = torch.Generator().manual_seed(3)
    cache, other = (create_cache("turboquant:bits=4", GEOMETRY) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(two_layers, fullgraph=True, backend=backend)
    number = operator_number(cache)
    for _ in range(3):
        k, v = (torch.randn(1, 2, 3, 64, generator=generator) for _ in range(2))
        q = torch.randn(1, 4, 3, 64, generator=generator)
        x = other.attend(0, k=k, v=v, q=q)
        other.attend(1, k=k, v=v, q=q)
        config = AttendConfig(softmax_scale=0.2, sliding_window=5)
        expected = other.attend(1, k=k * 2, v=v, q=q + x, config=config)
        assert torch.equal(compiled(number, k, v, q), expected)
    assert [cache.seq_len(layer) for layer in (0, 1)] == [9, 18]


def test_its_shape_is_known_without_running_it():
    cache = create_cache("int:bits=8", CacheGeometry(1, 2, 64, 48, dtype=torch.float32))
    k, v, q = torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 48), torch.randn(1, 4, 3, 64)
    number = operator_number(cache)
    given = (number, 0, k, v, q)
    torch.library.opcheck(
        torch.ops.kvpact.attend, given, test_utils=("test_schema", "test_faketensor")
    )
    assert torch.ops.kvpact.attend(*given).shape == (1, 4, 3, 48)


def test_a_cache_has_one_number_and_is_not_kept_alive():
    cache = create_cache("int:bits=8", GEOMETRY)
    number = operator_number(cache)
    assert operator_number(cache) == number
    assert operator_number(create_cache("int:bits=8", GEOMETRY)) != number
    del cache
    x = torch.ones(1, 2, 1, 64)
    with pytest.raises(KVPactError, match="gone"):
        torch.ops.kvpact.attend(number, 0, k=x, v=x, q=x)
