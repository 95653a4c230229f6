"""What the first implementations of the contract got wrong, A1 to A10: it may not come back.

A3, A4, A5 and A9 are in `test_a_codecs.py`, A10 in `test_a_devices.py`.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvpact
from kvpact import AttendConfig, CacheGeometry
from kvpact.errors import CacheFull, NonFiniteError
from kvpact.kernels import CHUNK, StreamView
from kvpact.kernels.plan import native
from kvpact.methods.turboquant import TurboQuantCodec

METHODS = ["fp8", "int:bits=4", "turboquant:bits=3,center=64", "turboquant:bits=3,mode=prod",
           "kivi:bits=2", "kvarn:bits=3"]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kvq(tokens: int, dim: int = 64, batch: int = 1, heads: int = 2, groups: int = 2, seed: int = 0):
    k, v = (normal(batch, heads, tokens, dim, seed=seed + i) for i in (1, 2))
    return k, v, normal(batch, heads * groups, tokens, dim, seed=seed + 3)


def fill(spec: str, k: Tensor, v: Tensor, config: AttendConfig | None = None, **options):
    """Return a cache of one layer that holds tokens."""
    geometry = CacheGeometry(1, k.shape[1], k.shape[3], v.shape[3])
    cache = kvpact.create_cache(spec, geometry, **options)
    cache.prefill(0, k, v, None, config)
    return cache


def causal(queries: int, total: int) -> Tensor:
    return torch.ones(queries, total, dtype=torch.bool).tril(total - queries)


def shown(cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V as stored, seen past one more token of a fork."""
    result = cache.fork().prefill(0, k[:, :, :1], v[:, :, :1])
    return result.k[:, :, :-1], result.v[:, :, :-1]


# --- A1: the bias of QJL lacked the softmax' scale and was added to exact keys, too.


@pytest.mark.parametrize("scale", [None, 0.02, 0.3])
def test_a1_bias_of_prod_is_in_units_of_the_scaled_logits(scale):
    k, v, q = kvq(105, dim=128)
    spec = "turboquant:bits=3,mode=prod,sinks=4,window=16"
    config = AttendConfig(softmax_scale=scale)
    new = [x[:, :, 100:] for x in (k, v, q)]
    cache = fill(spec, k[:, :, :100], v[:, :, :100])
    output = cache.fork().attend(0, *new, config)
    whole_key = cache.fork().prefill(0, *new[:2], None, config).k  # without q, K holds it all
    result = cache.prefill(0, *new, config)
    used = scale if scale is not None else 128**-0.5
    missing = (whole_key - result.k).repeat_interleave(2, 1)
    assert result.logit_bias.shape == (1, 4, 5, 105)
    torch.testing.assert_close(result.logit_bias, used * new[2] @ missing.mT, rtol=1e-4, atol=2e-5)
    assert result.logit_bias[..., 4:84].abs().min() > 0
    # Standard attention over what the result shows is what the cache computes by itself.
    bias = result.logit_bias.masked_fill(~causal(5, 105), -math.inf)
    shown = sdpa(new[2], result.k, result.v, bias, scale=used, enable_gqa=True)
    torch.testing.assert_close(shown, output, rtol=1e-4, atol=2e-6)
    # The keys without their bias are another thing: the test can see it.
    unbiased = sdpa(new[2], result.k, result.v, causal(5, 105), scale=used, enable_gqa=True)
    assert (unbiased - output).abs().max() > 1e-3


def test_a1_exact_tokens_have_no_bias():
    k, v, q = kvq(105)
    first = kvpact.create_cache("turboquant:bits=3,mode=prod", CacheGeometry(1, 2, 64))
    assert first.prefill(0, k, v, q).logit_bias is None  # the first prefill is exact throughout
    cache = fill("turboquant:bits=3,mode=prod,sinks=4,window=16", k[:, :, :100], v[:, :, :100])
    result = cache.prefill(0, k[:, :, 100:], v[:, :, 100:], q[:, :, 100:])
    exact = [*range(4), *range(84, 105)]  # sinks, window, the new tokens
    assert not result.logit_bias[..., exact].any()
    assert torch.equal(result.k[:, :, exact], k[:, :, exact])
    assert torch.equal(result.v[:, :, exact], v[:, :, exact])


# --- A2: no identity for sequences; no truncate, fork, gather, capacity.


@pytest.mark.parametrize("spec", METHODS)
def test_a2_sequences_do_not_share_rows(spec):
    k, v, _ = kvq(300, batch=3)
    cache = fill(spec, k[:, :, :200], v[:, :, :200])
    other = cache.fork()
    other.prefill(0, k[:, :, 200:], v[:, :, 200:])
    cache.prefill(0, v[:, :, 200:], k[:, :, 200:])
    wanted = fill(spec, k[:, :, :200], v[:, :, :200])
    wanted.prefill(0, k[:, :, 200:], v[:, :, 200:])
    for got, expected in zip(shown(other, k, v), shown(wanted, k, v), strict=True):
        assert torch.equal(got, expected)
    # Rows of a batch are sequences of their own.
    other.select(torch.tensor([2, 0]))
    alone = fill(spec, k[2:, :, :200], v[2:, :, :200])
    alone.prefill(0, k[2:, :, 200:], v[2:, :, 200:])
    rows = shown(other, k[[2, 0]], v[[2, 0]])
    for got, expected in zip(rows, shown(alone, k[2:], v[2:]), strict=True):
        assert torch.equal(got[:1], expected)


@pytest.mark.parametrize("spec", METHODS)
def test_a2_truncate_within_the_window_is_as_if_the_tokens_had_never_come(spec):
    k, v, _ = kvq(160)
    cache, short = fill(spec, k, v), fill(spec, k[:, :, :130], v[:, :, :130])
    cache.truncate(130)
    assert cache.seq_len(0) == short.seq_len(0) == 130
    more = normal(1, 2, 70, 64, seed=9)
    for each in (cache, short):
        each.prefill(0, more, more)
    for got, expected in zip(shown(cache, k, v), shown(short, k, v), strict=True):
        assert torch.equal(got[:, :, 130:], expected[:, :, 130:])
    cache.truncate(500)
    assert cache.seq_len(0) == 200


def test_a2_reset_capacity_reorder_and_repeat():
    k, v, q = kvq(64, batch=2)
    cache = fill("int:bits=4", k, v, max_tokens=64)
    with pytest.raises(CacheFull, match="64 allowed, 0 free"):
        cache.attend(0, k[:, :, :1], v[:, :, :1], q[:, :, :1])
    assert cache.seq_len(0) == 64
    cache.repeat(2)
    cache.reorder(torch.tensor([3, 2, 1, 0]))
    cache.truncate(60)
    rows = [1, 1, 0, 0]
    assert torch.equal(shown(cache, k[rows], v[rows])[0][:, :, -1], k[rows][:, :, 59])
    cache.reset()
    assert cache.seq_len(0) == 0 and cache.memory_usage() == 0
    cache.attend(0, k[:1], v[:1], q[:1])  # another batch size may come
    assert cache.batch_size == 1


# --- A6: sliding window, batch > 1, softcap, sinks and masks were refused or ignored.


def mask_of_a_tree(queries: int, total: int) -> Tensor:
    mask = causal(queries, total)[None, None].clone()
    mask[..., -2, -3] = False  # two drafts that don't see each other
    return mask


RULES = {
    "sliding window": AttendConfig(sliding_window=90),
    "softcap": AttendConfig(softcap=1.5),
    "sink logits": AttendConfig(sink_logits=torch.tensor([0.0, 1.0, 2.0, 6.0])),
    "boolean mask": AttendConfig(mask=mask_of_a_tree(3, 203), is_causal=False),
    "additive mask": AttendConfig(mask=torch.linspace(-3, 0, 203).expand(2, 4, 3, 203)),
    "padding": AttendConfig(padding=torch.tensor([0, 70])),
    "softmax scale": AttendConfig(softmax_scale=0.4),
}


def explicit(q: Tensor, k: Tensor, v: Tensor, config: AttendConfig) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = q @ k.mT * (config.softmax_scale or q.shape[-1] ** -0.5)
    if config.softcap:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    seen = causal(q.shape[2], k.shape[2])[None, None]
    if config.sliding_window:
        seen = seen & (torch.arange(203) > torch.arange(200, 203)[:, None] - config.sliding_window)
    if config.padding is not None:
        seen = seen & (torch.arange(k.shape[2]) >= config.padding[:, None, None, None])
    if config.mask is not None and config.mask.dtype == torch.bool:
        seen = seen & config.mask
    elif config.mask is not None:
        logits = logits + config.mask
    logits = logits.masked_fill(~seen, -math.inf)
    if config.sink_logits is not None:
        sinks = config.sink_logits.view(1, 4, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", METHODS)
def test_a6_rules_are_honoured_on_packed_slots(rule, spec):
    config = RULES[rule]
    k, v, q = kvq(203, batch=2)
    new = [x[:, :, 200:] for x in (k, v, q)]
    cache = fill(spec, k[:, :, :200], v[:, :, :200], AttendConfig(padding=config.padding))
    output = cache.fork().attend(0, *new, config)
    plain = cache.fork().attend(0, *new, AttendConfig(padding=torch.tensor([0, 0])))
    result = cache.prefill(0, *new[:2])
    wanted = explicit(new[2], result.k, result.v, config)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=2e-6)
    if rule != "padding":  # padding is the cache's from the first call on
        assert (output - plain).abs().max() > 1e-3


# --- A7: every step decompressed the whole cache.


@pytest.fixture
def decoded_tokens(monkeypatch) -> list[int]:
    """Count the tokens of every decoding, and forbid decompressed keys and values."""
    counts: list[int] = []
    decode = TurboQuantCodec.decode

    def counted(self, arrays):
        y = decode(self, arrays)
        counts.append(y.shape[2])
        return y

    monkeypatch.setattr(TurboQuantCodec, "decode", counted)
    return counts


@pytest.mark.parametrize("spec", ["turboquant:bits=4", "turboquant:bits=3,center=128"])
@pytest.mark.parametrize("queries", [1, 40])
def test_a7_attending_never_materialises_the_cache(decoded_tokens, monkeypatch, spec, queries):
    k, v, q = kvq(2100)
    cache = fill(spec, k, v, kernel="torch")
    assert decoded_tokens == []  # nothing is read to store
    for name in ("dequantize", "dequantize_without_bias"):
        monkeypatch.setattr(StreamView, name, lambda *_: pytest.fail("decompressed"))
    new = [x[:, :, :queries] for x in (k, v, q)]
    cache.attend(0, *new)
    if queries == 1:
        cache.decode(0, *new)
    assert max(decoded_tokens) <= CHUNK == 256
    # K and V, once each: nothing is decoded twice in a call.
    calls = 2 if queries == 1 else 1
    assert sum(decoded_tokens) <= calls * 2 * (2100 + CHUNK)


@pytest.mark.skipif(native()[0] is None, reason=native()[1])
def test_a7_the_native_kernel_decodes_nothing_outside_of_it(decoded_tokens):
    k, v, q = kvq(2100)
    cache = fill("turboquant:bits=4", k, v, kernel="exact")
    cache.decode(0, *(x[:, :, :1] for x in (k, v, q)))
    assert cache.stats()["kernel"]["calls"] == {"cpu": 1}
    assert decoded_tokens == []


def test_a7_a_prefill_decompresses_what_is_read_and_no_more(decoded_tokens):
    k, v, q = kvq(1000)
    cache = fill("turboquant:bits=4", k, v, kernel="torch")
    result = cache.prefill(0, k[:, :, :300], v[:, :, :300], q[:, :, :300])
    assert decoded_tokens == []
    ends = []
    for tile in result.tiles():
        assert tile.k.shape[2] == tile.v.shape[2] == tile.end - tile.start <= CHUNK
        ends.append((tile.start, tile.end))
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == 1300
    assert max(decoded_tokens) <= CHUNK


# --- A8: NaN, infinity and overflow of fp16 were not looked at.


def state(cache) -> list[Tensor]:
    return [tensor.clone() for layer in cache._layers for tensor in layer.tensors()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("call", ["attend", "prefill", "decode"])
def test_a8_what_is_not_finite_is_refused_and_changes_nothing(bad, which, call):
    k, v, q = kvq(140)
    cache = fill("turboquant:bits=4", k, v)
    before = state(cache)
    given = [x[:, :, :1].clone() for x in (k, v, q)]
    given[which][0, 1, 0, 5] = bad
    with pytest.raises(NonFiniteError, match="kvq"[which] + " holds NaN or infinity"):
        getattr(cache, call)(0, *given)
    assert cache.seq_len(0) == 140
    assert all(map(torch.equal, state(cache), before))


# Values that are finite, but whose side information is beyond fp16; and values just below.
OVERFLOWS = {
    "turboquant:bits=4": (1e5, 5e4),
    "turboquant:bits=4,scale=l2": (1e5, 6e4),
    "turboquant:bits=3,center=64": (1e6, 1.7e3),
    "turboquant:bits=3,mode=prod": (1e6, 1e4),
    "int:bits=4": (1e6, 6e4),
    "int:bits=8": (1e7, 6e4),
    "kivi:bits=2": (1e5, 6e4),
    "kvarn:bits=3": (1e6, 4e3),
    "fp8": (1e8, 6e4),
    "fp8:scale=none": (500.0, 400.0),
}


@pytest.mark.parametrize("spec", OVERFLOWS)
@pytest.mark.parametrize("held", [0, 140])
def test_a8_overflow_of_side_information_is_refused_and_changes_nothing(spec, held):
    too_large, fits = OVERFLOWS[spec]
    k, v, q = kvq(140, dim=128)
    # Signs alone: the norm of a vector is 11.3 times the magnitude, beyond fp16 in every case.
    x = torch.sign(normal(1, 2, 64, 128, seed=4))
    cache = kvpact.create_cache(spec, CacheGeometry(1, 2, 128))
    if held:
        cache.prefill(0, k, v)
    before = state(cache)
    for given in ((x * too_large, x), (x, x * too_large)):
        for call in (cache.attend, cache.prefill):
            with pytest.raises(NonFiniteError, match=r"beyond|holds magnitudes up to"):
                call(0, *given, q[:, :, :64])
        assert cache.seq_len(0) == held
        assert all(map(torch.equal, state(cache), before))
    cache.prefill(0, x * fits, x * fits)
    for stored in shown(cache, x, x):
        assert torch.isfinite(stored).all()
        last = stored[:, :, held:]
        assert (last - x * fits).square().mean().sqrt() < 0.6 * fits
