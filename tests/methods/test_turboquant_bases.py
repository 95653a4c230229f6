"""`turboquant` with bases: each key less the mean of its tile, the first key, or nothing."""

import pytest
import torch
from one_layer import normal

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.errors import FormatError, SpecError
from kvpact.kernels.cpu.backend import CPU
from kvpact.methods.bases import FIRST, MEAN, NOTHING
from kvpact.methods.context import Context
from kvpact.spec import Spec

DIM = 64
SPEC = "turboquant:bits=3,center=64,first=true"


MIDDLE = 40 * normal(DIM, seed=1)
FIRST_KEY = 25 * normal(DIM, seed=2)
LIKE_FIRST, SMALL = 10, 20


def tile():
    """Tokens around a distant mean, the first key at two places, and a token near zero."""
    x = MIDDLE + normal(1, 1, 64, DIM, seed=3)
    x[0, 0, [0, LIKE_FIRST]] = FIRST_KEY
    x[0, 0, SMALL] = normal(DIM, seed=4)
    return x


def learnt(spec=SPEC, x=None, context=None):
    codec = parse_spec(spec).key.key_codec(DIM, torch.float32)
    return codec.learn(tile() if x is None else x, context or Context())


def stored(codec, x):
    return codec.transform.inverse(codec.decode(codec.encode(x)))


def test_each_token_takes_what_is_nearest():
    wanted = torch.full((64,), MEAN)
    wanted[[0, LIKE_FIRST]] = FIRST
    wanted[SMALL] = NOTHING
    assert torch.equal(learnt().encode(tile())["base"].flatten(), wanted.to(torch.uint8))


def test_the_mean_is_that_of_the_tokens_that_take_it():
    codec, x = learnt(), tile()
    arrays = codec.encode(x)
    mean = codec.transform.inverse(arrays["mean"].float() * arrays["mean_step"].float())[0, 0, 0]
    ordinary = [i for i in range(64) if i not in (0, LIKE_FIRST, SMALL)]
    step = float(arrays["mean_step"])
    assert (mean - x[0, 0, ordinary].mean(0)).norm() < step * DIM**0.5 / 2
    # Of all tokens it would be elsewhere, by far more than that.
    assert (mean - x[0, 0].mean(0)).norm() > 2 * step * DIM**0.5


def test_a_token_like_the_first_key_is_next_to_exact():
    x = tile()
    error = (stored(learnt(), x) - x).norm(dim=-1)[0, 0]
    plain = parse_spec("turboquant:bits=3,center=64").key.key_codec(DIM, torch.float32)
    without = (stored(plain, x) - x).norm(dim=-1)[0, 0]
    assert error[LIKE_FIRST] < 1e-3 * FIRST_KEY.norm()  # fp16
    assert without[LIKE_FIRST] > 0.1 * FIRST_KEY.norm()
    # Noise of 1 in 64 channels at 3 bits; the mean of 8 bits adds a little.
    assert error.median() == pytest.approx((64 * 0.0345) ** 0.5, rel=0.1)
    assert error[SMALL] < 2.5


def test_without_tiles_there_are_the_first_key_and_nothing():
    codec = learnt("turboquant:bits=3,first=true")
    assert [field.name for field in codec.fields] == ["codes", "scale", "base"]
    x = normal(1, 1, 64, DIM, seed=5)
    x[0, 0, ::2] += FIRST_KEY
    flags = codec.encode(x)["base"].flatten()
    assert torch.equal(flags, torch.tensor([FIRST, NOTHING] * 32, dtype=torch.uint8))
    error = (stored(codec, x) - x).square().sum(-1).mean()
    assert error == pytest.approx(64 * 0.0325, rel=0.1)


def test_the_first_key_of_each_row_behind_its_padding_counts():
    x = torch.cat([tile(), 3 * tile()])
    x[1, 0, 5] = -FIRST_KEY
    codec = learnt(x=x, context=Context(torch.tensor([0, 5]), sinks=4))
    assert codec.state()["first"].abs().max() < 1e-2 * FIRST_KEY.abs().max()
    codec = learnt(x=x, context=Context(torch.tensor([0, 64]), sinks=4))
    first = codec.transform.inverse(codec.state()["first"].float())
    torch.testing.assert_close(first[0], FIRST_KEY, rtol=0, atol=0.1)


def test_sinks_move_no_mean():
    """They are outliers, and held exactly besides."""
    caches = []
    for size in (5.0, 10.0):
        k = MIDDLE + normal(1, 2, 128, DIM, seed=6)
        k[:, :, :4] *= size
        geometry = CacheGeometry(1, 2, DIM, dtype=torch.float32)
        cache = create_cache(f"{SPEC},sinks=4,window=0", geometry)
        cache.prefill(0, k, k)
        caches.append(cache)
        assert torch.equal(cache.dequantize(0, "k")[:, :, :4], k[:, :, :4])
    one, other = (cache.dequantize(0, "k")[:, :, 4:] for cache in caches)
    assert torch.equal(one, other)


def test_slots_take_fewer_bits_than_with_a_mean_alone():
    """A mean of 8 bits and a step of 16 a tile, and a flag of 2 bits, in place of 16 bits."""
    bits = {}
    for spec in (SPEC, "turboquant:bits=3,center=64"):
        codec = parse_spec(spec).key.key_codec(DIM, torch.float32)
        bits[spec] = 8 * sum(field.bytes_per_token for field in codec.fields) / DIM
    assert bits[SPEC] == pytest.approx(3 + 16 / 64 + 8 / 64 + 16 / 64 / 64 + 2 / 64)
    assert bits["turboquant:bits=3,center=64"] == pytest.approx(3 + 16 / 64 + 16 / 64)


@pytest.mark.parametrize("change", [
    lambda first: first.float(), lambda first: first[:, 1:], lambda first: first * torch.inf,
], ids=["dtype", "width", "infinite"])  # fmt: skip
def test_another_state_is_refused(change):
    codec = learnt()
    with pytest.raises(FormatError, match="first"):
        codec.restore({"first": change(codec.state()["first"])})
    with pytest.raises(FormatError, match="first, weight"):
        codec.restore({**codec.state(), "weight": torch.ones(1, DIM)})


def test_not_with_signs_of_the_residual():
    with pytest.raises(SpecError, match=r"first=True should be false with mode=prod"):
        parse_spec("turboquant:bits=3,mode=prod,first=true")


def test_specs_of_before_are_as_they_were():
    """Files and prefixes hold them as JSON."""
    data = parse_spec("turboquant:bits=3,center=64").to_json()
    assert "first" not in data["key"] and "first" not in data["value"]
    assert parse_spec(SPEC).to_json()["key"]["first"] is True
    assert Spec.from_json(data) == parse_spec("turboquant:bits=3,center=64,first=false")


def test_kernels_decline_with_a_reason():
    codec = learnt()
    for operation in ("attend", "encode", "decode"):
        reason = CPU.covers(operation, codec, torch.float32)
        assert reason.startswith("no native") and "TurboQuantKeyCodec" in reason
