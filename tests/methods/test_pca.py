"""`pca`: bits where they count, tokens of two kinds, unlike tokens, and keys before RoPE."""

from itertools import product

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache, parse_spec
from kvpact.errors import FormatError, GeometryError, SpecError
from kvpact.key_rotation import KeyRotation
from kvpact.methods.fitted import Calibrating
from kvpact.methods.pca_codec import _DISTORTION, allocated_bits, key_weights, value_weights
from kvpact.quantizers import trellis
from kvpact.testing import random_tokens
from kvpact.testing.method_base import relative_error


def codec(bits=2.0, side="value", dim=32, **options):
    text = ",".join(f"{name}={value}" for name, value in {"bits": bits, **options}.items())
    method = getattr(parse_spec(f"pca:{text}"), side)
    return getattr(method, f"{side}_codec")(dim, torch.float32)


def low_rank(heads, tokens, dim, rank, seed=0):
    """Tokens whose heads all depend on a few numbers."""
    numbers = random_tokens(1, 1, tokens, rank, seed=seed)
    joint = numbers @ random_tokens(1, 1, rank, heads * dim, seed=99) / rank**0.5
    return joint.view(1, tokens, heads, dim).transpose(1, 2).contiguous()


@pytest.mark.parametrize("room", [8, 11, 17])
def test_bits_are_given_where_they_take_off_most_error(room):
    deviation = [4.0, 2.5, 2.4, 1.0, 0.9, 0.5, 0.2, 0.1]

    def error(bits):
        return sum(s * s * _DISTORTION[b] for s, b in zip(deviation, bits, strict=True))

    found = allocated_bits(deviation, room)
    assert sum(found) == room and len(found) == 8 and found == sorted(found, reverse=True)
    choices = (c for c in product(range(1, 7), repeat=8) if sum(c) == room)
    assert error(found) == pytest.approx(min(map(error, choices)))


def test_components_without_bits_are_left_out_and_none_has_more_than_six():
    assert allocated_bits([9.0] * 3 + [0.01] * 61, 20)[:3] == [5, 5, 5]
    assert len(allocated_bits([9.0] * 3 + [1e-4] * 61, 20)) == 8  # the shortest trellis
    assert allocated_bits([1.0] * 10, 1000) == [6] * 10
    assert sum(allocated_bits([1.0, 0.5], 15)) == 15  # of components that are not there, too


@pytest.mark.parametrize("bits", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_are_all_included(bits, dim):
    k, v = codec(bits, "key", dim), codec(bits, "value", dim)
    held = [sum(f.bytes_per_token for f in c.fields) for c in (k, v)]
    assert 8 * sum(held) / (2 * dim) == bits
    assert held[1] > held[0]
    fitted = v.fit(random_tokens(1, 3, 600, dim))
    assert 10 + sum(fitted._bits) == 8 * 3 * held[1]  # scale and flag are the ten
    assert codec(bits, "key", dim, lean=0.0).fields[0].count * 8 / dim == bits


def test_equal_bits_and_importance_are_the_plain_trellis():
    y = random_tokens(1, 1, 40, 48)
    for bits in (1, 3, 6):
        plain = trellis.encode(y * (1 / trellis.UNITS[bits]), bits, 16)
        mixed = trellis.encode_mixed(y, [bits] * 48, torch.ones(48), 16)
        assert torch.equal(plain, mixed)
        levels = trellis.lookup_mixed(mixed, [bits] * 48, 16)
        assert torch.equal(levels, trellis.lookup(plain, bits, 16) * trellis.UNITS[bits])


def test_unlike_bits_have_the_distortion_of_each():
    bits = [5] * 40 + [3] * 60 + [1] * 92
    y = random_tokens(1, 1, 3000, 192)[0, 0]
    importance = torch.tensor([4.0**k for k in bits])
    codes = trellis.encode_mixed(y, bits, importance, 16)
    error = (trellis.lookup_mixed(codes, bits, 16) - y).square()
    for k, part in ((5, error[:, :40]), (3, error[:, 40:100]), (1, error[:, 100:])):
        assert float(part.mean()) == pytest.approx(_DISTORTION[k], rel=0.12)


def test_what_all_heads_have_in_common_is_stored_once():
    x = low_rank(4, 1500, 32, rank=12)
    fitted = codec(1.0, lean=0.0).fit(x[:, :, :1000])
    error = relative_error(x[:, :, 1000:], fitted.decode(fitted.encode(x[:, :, 1000:])))
    assert error < 0.035  # one bit a number without it: above .5


def test_small_values_have_a_mean_of_their_own():
    """Attention sinks inside the text: their values are nearly nothing, and so is their error."""
    ordinary = random_tokens(1, 2, 1000, 32) + 3
    sinks = 0.05 * random_tokens(1, 2, 1000, 32, seed=1) + 0.1
    which = (torch.arange(1000) % 40 == 7).view(1, 1, -1, 1)
    x = torch.where(which, sinks, ordinary)
    known = Calibrating(x, torch.ones(1, 2, 1000, 32))
    fitted = codec(2.0).calibrated(x, known)
    error = (fitted.decode(fitted.encode(x)) - x).square().mean((1, 3))[0]
    assert float(error[which.flatten()].max()) < 0.02
    assert fitted.state()["mean"][1].abs().max() < 0.3 < 2 < fitted.state()["mean"][0].min()


def test_tokens_unlike_the_calibration_are_not_cut_off():
    x = random_tokens(1, 2, 2000, 32)
    fitted = codec(4.0).fit(x)
    strange = x[:, :, :50].clone()
    strange[:, 0, :, 3] += 60
    error = relative_error(strange, fitted.decode(fitted.encode(strange)))
    assert error < 0.12  # with a scale of the root mean square: .4


def test_weights_shift_error_to_channels_that_count_less():
    x, energy = random_tokens(1, 2, 2000, 32), torch.ones(2, 32)
    energy[:, :8] = 100
    known = Calibrating(x, torch.ones(1, 2, 2000, 32), energy)
    fitted = codec(2.0).calibrated(x, known)
    error = (fitted.decode(fitted.encode(x)) - x).square().mean((0, 1, 2))
    assert float(error[:8].mean()) < 0.1 * float(error[8:].mean())
    pairs = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])
    weights = key_weights(torch.arange(1.0, 9.0).view(1, 8), pairs)
    assert torch.equal(weights[:4], weights[4:])
    assert float(weights.square().mean()) == pytest.approx(1)
    assert torch.equal(value_weights(torch.zeros(2, 8)), torch.ones(16))


# Slow turns: within a few hundred tokens the rotated keys fill far more directions.
ROTATION = KeyRotation.of(0.05 ** torch.linspace(0.2, 1, 16))


def turned(x, start=0):
    return ROTATION.turn(x.clone(), torch.arange(start, start + x.shape[2]).view(1, 1, -1))


def calibrated(bits=2.0):
    x = low_rank(2, 1200, 32, rank=10)
    known = Calibrating(x, torch.ones(1, 2, 1200, 32), None, ROTATION)
    k = codec(bits, "key").calibrated(turned(x), known)
    v = codec(bits).calibrated(x, known)
    return {0: (k.state(), v.state())}


def test_a_rotation_is_undone():
    x = random_tokens(2, 2, 9, 32)
    positions = torch.arange(9).view(1, 1, -1)
    y = ROTATION.turn(x.clone(), positions)
    torch.testing.assert_close(y[:, :, 0], x[:, :, 0])
    angle = 5 * ROTATION.frequencies[3]
    wanted = x[:, :, 5, 3] * angle.cos() - x[:, :, 5, 19] * angle.sin()
    torch.testing.assert_close(y[:, :, 5, 3], wanted)
    torch.testing.assert_close(ROTATION.turn(y, positions, back=True), x, atol=1e-5, rtol=0)
    even = KeyRotation.of(torch.tensor([0.5, 0.1]), "interleaved")
    assert even.channels.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(GeometryError):
        KeyRotation.of(torch.zeros(2), "other")
    with pytest.raises(FormatError):
        ROTATION.check(16)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_keys_are_stored_as_they_are_before_rope(layout):
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float32)
    pages = {"layout": "paged", "num_pages": 16} if layout == "paged" else {}
    plain = low_rank(2, 300, 32, rank=10, seed=5)
    k, v = turned(plain), plain
    found = {}
    for rope in (True, False):
        known = calibrated()
        if not rope:
            state = {n: x for n, x in known[0][0].items() if n not in ("frequencies", "channels")}
            known = {0: (state, known[0][1])}
        cache = create_cache("pca:bits=2", geometry, calibration=known, **pages)
        cache.prefill(0, k, v, None)
        result = cache.prefill(0, k[:, :, :1], v[:, :, :1], None)
        found[rope] = relative_error(k, result.k[:, :, :300])
    assert found[True] < 0.03 < 0.3 < found[False]


def test_attention_reads_rotated_keys():
    """It gives what exact attention over the decompressed keys gives."""
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float32)
    plain = low_rank(2, 200, 32, rank=10, seed=5)
    cache = create_cache("pca:bits=2,window=8", geometry, calibration=calibrated())
    cache.store(0, k=turned(plain), v=plain)
    k, v = cache.dequantize(0, "k"), cache.dequantize(0, "v")
    assert relative_error(turned(plain), k) < 0.035
    q, new = random_tokens(1, 4, 1, 32, seed=6), turned(low_rank(2, 1, 32, 10, seed=8), 200)
    found = cache.attend(0, k=new, v=new, q=q)
    keys, values = (torch.cat([x, new], 2).repeat_interleave(2, 1) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_positions_begin_behind_the_padding():
    """A padded row is stored as it is alone; also restored, forked, cut and selected."""
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float32)
    plain = low_rank(2, 190, 32, rank=10, seed=5)
    alone = create_cache("pca:bits=2", geometry, calibration=calibrated())
    alone.store(0, k=turned(plain), v=plain)
    both = create_cache("pca:bits=2", geometry, calibration=calibrated())
    k = torch.cat([torch.cat([plain[:, :, :20] * 0, turned(plain)[:, :, :170]], 2), turned(plain)])
    v = torch.cat([torch.cat([plain[:, :, :20] * 0, plain[:, :, :170]], 2), plain])
    both.store(0, k=k, v=v, config=AttendConfig(padding=torch.tensor([20, 0])))
    restored = create_cache("pca:bits=2", geometry)
    restored.restore(both.snapshot())
    forked, selected = both.fork(), both.fork()
    forked.truncate(160)
    selected.select(torch.tensor([1, 0]))
    wanted = alone.dequantize(0, "k")[0]
    for cache, row in ((both, 0), (restored, 0), (forked, 0), (selected, 1)):
        shown = cache.dequantize(0, "k")
        # The first 96 slots hold 76 tokens of the padded row; later tokens are exact.
        torch.testing.assert_close(shown[row, :, 24:96], wanted[:, 4:76], atol=1e-4, rtol=0)
        torch.testing.assert_close(shown[1 - row, :, 4:96], wanted[:, 4:96], atol=1e-4, rtol=0)


def test_a_layer_without_rope_is_found_by_its_keys():
    """Some hybrids leave RoPE out in some layers; turning their keys back would scatter them."""
    x = low_rank(2, 1200, 32, rank=10)
    for keys, wanted in ((x, False), (turned(x), True)):
        known = Calibrating(x, torch.ones(1, 2, 1200, 32), None, ROTATION)
        fitted = codec(2.0, "key").calibrated(keys, known)
        assert (fitted.rotation is not None) is wanted
    with pytest.raises(FormatError, match="width 16"):
        known = Calibrating(x, torch.ones(1, 2, 1200, 16), None, ROTATION)
        codec(2.0, "key", 16).calibrated(x[..., :16], known)


def test_states_of_another_kind_are_refused():
    fitted = codec(2.0).fit(random_tokens(1, 2, 200, 32))
    for name, kind in (
        ("mean", torch.float16), ("basis", torch.float64), ("weight", torch.float64),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=name):
            codec(2.0).restore({**fitted.state(), name: fitted.state()[name].to(kind)})
    geometry = CacheGeometry(1, 3, 32)
    with pytest.raises(FormatError, match="3 heads"):
        create_cache("int:bits=8/pca", geometry, calibration={0: ({}, fitted.state())})


def test_slots_of_any_bits_are_read():
    """Those of a damaged file, too: every flag has a base."""
    fitted = codec(2.0).fit(random_tokens(1, 2, 200, 32))
    size = fitted.fields[0].count
    data = random_tokens(1, 2, 50, size).mul(60).to(torch.int32).to(torch.uint8)
    assert fitted.decode({"codes": data | 255}).isfinite().all()
    assert fitted.decode({"codes": data}).isfinite().all()


def test_more_bits_than_there_are_to_use_go_to_keys():
    for bits in (5.0, 5.5, 6.0):
        k, v = codec(bits, "key", 64), codec(bits, "value", 64)
        assert k.fields[0].count + v.fields[0].count == 2 * bits * 8
        assert v.fields[0].count <= 49


def test_wrong_options_and_heads_are_refused():
    for text in ("pca:bits=0.2", "pca:bits=7", "pca:states=4", "pca:lean=1.0"):
        with pytest.raises(SpecError):
            parse_spec(text)
    fitted = codec(2.0).fit(random_tokens(1, 2, 64, 32))
    with pytest.raises(GeometryError, match="2 heads"):
        fitted.encode(random_tokens(1, 3, 4, 32))
    with pytest.raises(GeometryError, match="2 heads"):
        fitted.decode({"codes": torch.zeros(1, 3, 4, 9, dtype=torch.uint8)})
