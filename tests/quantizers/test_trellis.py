"""Trellis-coded quantisation against published distortions, parity checks and exhaustive search."""

import itertools

import numpy as np
import pytest
import torch
from one_layer import normal

from kvpact.methods.trellis_codec import TrellisCodec, places, steps
from kvpact.quantizers import trellis

# Mean square error over normal numbers with a scale of 8 bits, 1 to 4 bits. What k bits can have at
# best is 4^-k; Lloyd-Max has .363, .1175, .0345, .0095.
DISTORTION = {
    (64, 16): (0.2957, 0.0827, 0.0226, 0.00618), (128, 16): (0.2960, 0.0832, 0.0228, 0.00619),
    (256, 16): (0.2965, 0.0834, 0.0228, 0.00621), (64, 8): (0.2999, 0.0837, 0.0229, 0.00624),
}  # fmt: skip
TAPS = {8: ((0, 1, 3), (2,)), 16: ((0, 1, 4), (2,))}
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dim", "states"), DISTORTION)
@pytest.mark.parametrize("order", ["token", "channel"])
def test_distortion(dim, states, order):
    x = normal(1, 1, 128_000 // dim, dim, seed=dim)
    for bits, wanted in enumerate(DISTORTION[dim, states], 1):
        codec = TrellisCodec(dim, bits, states, order, seed=3)
        y = codec.transform.inverse(codec.decode(codec.encode(x)))
        found = float((y - x).square().mean() / x.square().mean())
        assert found == pytest.approx(wanted, rel=0.02)


def test_distortion_of_five_and_six_bits():
    x = normal(2_000, 64)
    for bits, limit in ((5, 0.00175), (6, 0.00048)):
        codes = trellis.encode(x / trellis.UNITS[bits], bits, 16)
        y = trellis.lookup(codes, bits, 16) * trellis.UNITS[bits]
        assert 4.0**-bits < float((y - x).square().mean()) < limit


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_are_odd_whole_numbers_of_8_bits(bits):
    levels = trellis.levels(bits, CPU)
    assert len(levels) == 2 ** (bits + 1)
    assert torch.equal(levels, -levels.flip(0))
    assert torch.equal(levels, levels.round()) and float(levels.abs().max()) <= 127
    assert bool((levels[1:] > levels[:-1]).all())


@pytest.mark.parametrize("states", trellis.STATES)
@pytest.mark.parametrize("bits", [1, 3, 5])
def test_indices_follow_the_code(states, bits):
    """The taps of one parity, applied to the other's word, give the same word."""
    codes = trellis.encode(normal(50, 40) / trellis.UNITS[bits], bits, states)
    index = trellis.indices(codes, states).numpy()
    u, c1, c0 = codes.numpy() & 1, index >> 1 & 1, index & 1
    assert np.array_equal(index >> 2, codes.numpy() >> 1)
    for parity, taps in zip((c1, c0), TAPS[states], strict=True):
        assert np.array_equal(parity, np.bitwise_xor.reduce([np.roll(u, t, -1) for t in taps]))
    first, second = (
        np.bitwise_xor.reduce([np.roll(parity, t, -1) for t in taps])
        for parity, taps in zip((c0, c1), TAPS[states], strict=True)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("states", trellis.STATES)
def test_without_coded_bits_every_subset_is_the_first(states):
    codes = 2 * torch.arange(8, dtype=torch.uint8).repeat(2)
    assert torch.equal(trellis.indices(codes, states), 4 * (codes >> 1))


@pytest.mark.parametrize("states", trellis.STATES)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [8, 31, 32, 64])
def test_codewords_encode_to_themselves(states, bits, dim):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (200, dim), dtype=torch.uint8, generator=generator)
    levels = trellis.lookup(codes, bits, states)
    assert torch.equal(trellis.lookup(trellis.encode(levels, bits, states), bits, states), levels)


@pytest.mark.parametrize("states", trellis.STATES)
def test_short_vectors_have_the_best_codes_of_all(states):
    x = normal(60, 8, seed=4) / trellis.UNITS[2]
    words = torch.tensor(list(itertools.product((0, 1), repeat=8)), dtype=torch.uint8)
    best = torch.full((60,), torch.inf, dtype=torch.float64)
    for word in words:
        both = torch.stack([trellis.lookup(word + 2 * p, 2, states) for p in (0, 1)])
        nearest = (x.double() - both.double().unsqueeze(1)).square().amin(0)
        best = torch.minimum(best, nearest.sum(-1))
    found = (x.double() - trellis.lookup(trellis.encode(x, 2, states), 2, states)).square().sum(-1)
    assert torch.allclose(found, best, rtol=1e-5)


def test_long_vectors_are_near_the_best():
    """Within 1 % of what every first state, tried in turn, would give."""
    z = (normal(300, 64, seed=5) / trellis.UNITS[3]).mT.contiguous()
    distances, _ = trellis._nearest(z, 3)
    passes = trellis._Trellis(distances, 16)
    ends = []
    for state in range(16):
        cost = torch.full((16, 300), 1e30)
        cost[state] = 0
        ends.append(passes.run([*range(64)], cost)[0][state])
    best = torch.stack(ends).amin(0)
    found = (z.mT - trellis.lookup(trellis.encode(z.mT, 3, 16), 3, 16)).square().sum(-1)
    assert bool((found >= best * (1 - 1e-5)).all())
    assert float(found.mean()) < 1.01 * float(best.mean())


def test_codes_are_the_same_in_any_batch():
    x = normal(37, 48) / trellis.UNITS[4]
    whole = trellis.encode(x, 4, 16)
    assert torch.equal(whole[5:6], trellis.encode(x[5:6], 4, 16))
    assert torch.equal(whole.view(37, 1, 48), trellis.encode(x.view(37, 1, 48), 4, 16))
    assert trellis.encode(x[:0], 4, 16).shape == (0, 48)


@pytest.mark.parametrize("bits", range(1, 6))
@pytest.mark.parametrize("dim", [16, 20, 48, 64, 96])
def test_places_and_steps_undo_each_other(bits, dim):
    interleave = 4 if bits <= 3 else 8
    place = places(dim, bits, interleave, CPU)
    assert torch.equal(place[steps(dim, bits, interleave, CPU)], torch.arange(dim))


def test_neighbours_of_a_step_are_in_other_words():
    """Step i is in word `i % words`, at an item that moves on by one after all words."""
    place = places(128, 4, 8, CPU)  # 16 words of 8 codes, as two wider words of 4
    word = torch.arange(128) // 8
    assert torch.equal(word, place % 16)
    slot = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).repeat(16)
    assert torch.equal(place // 16, slot)
