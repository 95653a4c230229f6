"""`attend` against attention written out in fp64 (`kvpact.testing`), over an exact cache."""

import math

import pytest
import torch
from torch import Tensor

import kvpact
from kvpact import AttendConfig, errors
from kvpact.kernels import CHUNK
from kvpact.testing import reference_attention as reference

DIM, VALUE_DIM = 16, 24


def tensors(batch=2, q_heads=6, kv_heads=2, total=70, queries=None, seed=0, dtype=torch.float32):
    """Return q of the last `queries` tokens and K and V of all `total`."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, kv_heads, total, DIM, generator=g).to(dtype)
    v = torch.randn(batch, kv_heads, total, VALUE_DIM, generator=g).to(dtype)
    q = torch.randn(batch, q_heads, total, DIM, generator=g).to(dtype)
    return q[:, :, total - (queries or total) :], k, v


def attended(q: Tensor, k: Tensor, v: Tensor, config: AttendConfig, spec="none", chunks=None):
    """Store all but the last `q_len` tokens, then attend for these."""
    geometry = kvpact.CacheGeometry(1, k.shape[1], k.shape[3], v.shape[3])
    cache = kvpact.create_cache(spec, geometry)
    held = k.shape[2] - q.shape[2]
    if held:
        past = AttendConfig(padding=config.padding)
        cache.prefill(0, k[:, :, :held], v[:, :, :held], None, past)
    output = cache.attend(0, k=k[:, :, held:], v=v[:, :, held:], q=q, config=config)
    assert cache.seq_len(0) == k.shape[2]
    return output


def check(config: AttendConfig, **shape) -> Tensor:
    q, k, v = tensors(**shape)
    output = attended(q, k, v, config)
    assert output.shape == (*q.shape[:3], VALUE_DIM) and output.dtype == q.dtype
    torch.testing.assert_close(output.double(), reference(q, k, v, config), rtol=1e-5, atol=1e-6)
    return output


# Around the attention's chunk of 256 tokens and twice that, packed or new.
@pytest.mark.parametrize("total", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1])
def test_lengths_around_the_chunk(total):
    for queries in (1, min(2, total), total):
        check(AttendConfig(), batch=1, q_heads=2, kv_heads=1, total=total, queries=queries)


def test_sliding_window_over_several_chunks():
    for window in (3, 255, 256, 300):
        shape = {"batch": 1, "q_heads": 2, "total": 600, "queries": 280}
        check(AttendConfig(sliding_window=window), **shape)


def test_all_rules_together():
    g = torch.Generator().manual_seed(4)
    config = AttendConfig(
        softmax_scale=0.3, n_kv_groups=3, softcap=4.0, sliding_window=290,
        sink_logits=torch.randn(6, generator=g), mask=torch.rand(2, 6, 9, 600, generator=g) < 0.7,
        padding=torch.tensor([0, 320]),
    )  # fmt: skip
    check(config, total=600, queries=9)


@pytest.mark.parametrize("queries", [1, 5])
def test_queries_that_see_nothing_get_zeros(queries):
    mask = torch.ones(2, 6, queries, 70, dtype=torch.bool)
    mask[0, 2], mask[1, :, 0] = False, False
    for kind in (mask, torch.where(mask, 0.0, -math.inf), torch.where(mask, 0.0, -3.4e38)):
        output = check(AttendConfig(mask=kind), queries=queries)
        assert not output[0, 2].any() and not output[1, :, 0].any() and output[0, 3].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out_fp32_inside(dtype):
    q, k, v = tensors(dtype=dtype, queries=11)
    output = attended(q, k, v, AttendConfig())
    wanted = reference(q, k, v, AttendConfig())
    assert output.dtype == dtype
    # Right up to the rounding of the output (and fp32 before it), not of what is inside.
    step = torch.finfo(dtype).eps / 2 * wanted.abs().clamp(min=torch.finfo(dtype).tiny)
    assert ((output.double() - wanted).abs() <= 1.01 * step + 1e-6).all()


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("descending", [False, True])
def test_extreme_logits_stay_finite_and_right(magnitude, descending):
    # Logits from -magnitude to magnitude, the largest in the first chunk or in the last.
    total = 2 * CHUNK + 88
    line = torch.linspace(-1, 1, total).flip(0) if descending else torch.linspace(-1, 1, total)
    k = torch.zeros(1, 1, total, DIM)
    k[0, 0, :, 0] = line
    v = torch.randn(1, 1, total, VALUE_DIM, generator=torch.Generator().manual_seed(9))
    q = torch.zeros(1, 1, 1, DIM)
    q[..., 0] = magnitude
    config = AttendConfig(softmax_scale=1.0)
    output = attended(q, k, v, config)
    assert torch.isfinite(output).all()
    # The logits' own rounding in fp32 is what is left.
    torch.testing.assert_close(
        output.double(), reference(q, k, v, config), rtol=1e-4, atol=3e-7 * magnitude**0.5 + 1e-6
    )
    with_sink = AttendConfig(softmax_scale=1.0, sink_logits=torch.tensor([magnitude + 200]))
    assert not attended(q, k, v, with_sink).any()


def test_wrong_sink_logits_store_nothing_even_when_new_tokens_are_attended_as_stored():
    cache = kvpact.create_cache("int:bits=4", kvpact.CacheGeometry(1, 2, 64))
    x = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(0))
    config = kvpact.AttendConfig(exact_new=False, sink_logits=torch.zeros(3))
    with pytest.raises(errors.GeometryError, match="sink_logits"):
        cache.attend(0, k=x, v=x, q=x, config=config)
    assert cache.seq_len(0) == 0
