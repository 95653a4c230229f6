"""Codecs that are fitted: what is learnt, when, and what is refused."""

import pytest
import torch
from one_layer import normal

from kvpact import CacheGeometry, Hybrid, LowRank, VectorQuantization, create_cache, parse_spec
from kvpact.errors import FormatError, GeometryError, NonFiniteError, SpecError
from kvpact.quantizers.kmeans import kmeans, nearest
from kvpact.testing.held import same_bytes

METHODS = [LowRank(rank=8), LowRank(rank=8, per_head=False), LowRank(energy=0.9), Hybrid(rank=8),
           Hybrid(rank=99), VectorQuantization(), VectorQuantization(codebook_size=300, stages=2),
           VectorQuantization(codebook_size=5, dims=3)]  # fmt: skip
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


@each_method
@pytest.mark.parametrize("side", ["key_codec", "value_codec"])
def test_a_fitted_codec_gives_the_same_bytes_in_any_pieces(method, side: str):
    codec = getattr(method, side)(80, torch.float16).fit(normal(2, 3, 200, 80))
    x = normal(2, 3, 64, 80, seed=1)
    state = {name: tensor.clone() for name, tensor in codec.state().items()}
    whole = codec.encode(x)
    parts = [codec.encode(x[:, :, start : start + 1]) for start in range(64)]
    row = codec.encode(x[1:])
    for name, array in whole.items():
        assert same_bytes(array, torch.cat([part[name] for part in parts], 2)), name
        assert same_bytes(array[1:], row[name]), name
    assert all(same_bytes(state[name], tensor) for name, tensor in codec.state().items())
    assert set(whole) == {field.name for field in codec.fields}


@each_method
def test_an_unfitted_codec_learns_once_from_what_it_encodes(method):
    codec = method.key_codec(64, torch.float32)
    assert not codec.fitted
    assert codec.state() == {}
    with pytest.raises(SpecError, match="fit"):
        codec.decode({})
    x = normal(1, 2, 100, 64)
    arrays, fitted = codec.encode(x), codec.fit(x)
    for name, array in fitted.encode(x).items():
        assert same_bytes(array, arrays[name])
    codec.encode(normal(1, 2, 100, 64, seed=1))
    for name, tensor in fitted.state().items():
        assert same_bytes(tensor, codec.state()[name])


@each_method
def test_fit_refuses_what_is_no_calibration(method):
    codec = method.key_codec(64, torch.float32)
    for x in (normal(1, 2, 0, 64), normal(1, 2, 3, 32), normal(2, 3, 64)):
        with pytest.raises(GeometryError):
            codec.fit(x)
    with pytest.raises(NonFiniteError):
        codec.fit(normal(1, 2, 3, 64) / 0)
    assert not codec.fitted


@each_method
def test_restore_checks_the_state(method):
    codec = method.key_codec(64, torch.float32)
    state = codec.fit(normal(1, 2, 100, 64)).state()
    again = codec.restore(state)
    x = normal(1, 2, 5, 64)
    fitted = codec.fit(normal(1, 2, 100, 64)).encode(x)
    assert all(same_bytes(array, fitted[name]) for name, array in again.encode(x).items())
    broken = [{}, {**state, "other": x}]
    broken += [{**state, name: torch.zeros(0, 1, 2)} for name in state]
    broken += [{**state, name: t * torch.nan} for name, t in state.items() if t.dim() > 1
               and t.is_floating_point()]  # fmt: skip
    for wrong in broken:
        with pytest.raises(FormatError):
            codec.restore(wrong)


@each_method
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_few_calibration_tokens_are_enough_to_go_on(method, tokens: int):
    codec = method.key_codec(64, torch.float32).fit(normal(1, 1, tokens, 64))
    x = normal(1, 1, 50, 64, seed=1)
    y = codec.transform.inverse(codec.decode(codec.encode(x)))
    assert torch.isfinite(y).all()
    assert (y - x).norm() < 1.1 * x.norm()
    zeros = method.key_codec(64, torch.float32).fit(torch.zeros(1, 1, tokens, 64))
    decoded = zeros.transform.inverse(zeros.decode(zeros.encode(torch.zeros(1, 1, 3, 64))))
    assert not decoded.any()


def test_heads_that_were_not_fitted_are_refused():
    for method in (LowRank(rank=8), Hybrid(rank=8), Hybrid(rank=64)):
        codec = method.key_codec(64, torch.float32).fit(normal(1, 2, 100, 64))
        with pytest.raises(GeometryError, match="heads"):
            codec.encode(normal(1, 3, 5, 64))


def test_energy_chooses_the_least_rank():
    x = normal(1, 1, 500, 64) * torch.linspace(2, 0.01, 64)
    values = torch.linalg.svdvals(x[0, 0].double()).square()
    kept = values.cumsum(0) / values.sum()
    codec = LowRank(energy=0.95).key_codec(64, torch.float32).fit(x)
    assert codec.rank == int((kept < 0.95).sum()) + 1
    assert codec.lost == pytest.approx(1 - float(kept[codec.rank - 1]), abs=1e-6)


def test_codes_beyond_8_bits_come_back():
    method = VectorQuantization(codebook_size=65_536, dims=8)
    words = normal(1, 65_536, 8).half()
    codec = method.key_codec(64, torch.float32).restore({"codebooks": words})
    assert sum(field.bits for field in codec.fields[:2]) == 16
    chosen = torch.randint(65_536, (1, 1, 20, 8), generator=torch.Generator().manual_seed(1))
    arrays = {"low0": (chosen & 255).byte(), "high0": (chosen >> 8).byte(),
              "scale": torch.ones(1, 1, 20, 1, dtype=torch.float16)}  # fmt: skip
    assert torch.equal(codec.decode(arrays), words[0][chosen].flatten(-2).float())


def test_kmeans_finds_separate_clusters():
    generator = torch.Generator().manual_seed(0)
    centres = 100 * normal(20, 3)
    x = (centres.repeat(50, 1) + 0.1 * normal(1000, 3, seed=1))[torch.randperm(1000)]
    words = kmeans(x, 20, generator)
    assert (torch.cdist(centres, words).min(1).values < 0.2).all()
    assert torch.equal(nearest(centres, words), torch.cdist(centres, words).argmin(1))


@pytest.mark.parametrize("spec", ["lowrank:rank=64", "lowrank:rank=16", "vq", "hybrid:rank=64",
                                  "hybrid:rank=16", "lowrank:energy=0.9"])  # fmt: skip
def test_in_a_cache(spec: str):
    assert parse_spec(str(parse_spec(spec))) == parse_spec(spec)
    cache = create_cache(spec, CacheGeometry(1, 2, 64, 80))
    # Behind the window they learn from 192 tokens.
    k, v, q = normal(2, 2, 264, 64), normal(2, 2, 264, 80, seed=1), normal(2, 4, 264, 64, seed=2)
    exact = create_cache("none", CacheGeometry(1, 2, 64, 80))
    outputs = []
    for held in (cache, exact):
        held.attend(0, k=k, v=v, q=q)
        outputs.append(held.attend(0, k=k[:, :, :5], v=v[:, :, :5], q=q[:, :, :5]))
    assert torch.isfinite(outputs[0]).all()
    if spec == "hybrid:rank=64":
        torch.testing.assert_close(*outputs, rtol=0, atol=0.15)
    fork = cache.fork()
    fork.truncate(90)
    fork.attend(0, k=k[:, :, :9], v=v[:, :, :9], q=q[:, :, :9])
    assert (cache.seq_len(0), fork.seq_len(0)) == (269, 99)
