"""q8_0 and q4_0 against the quantiser of the gguf package, bit for bit, through a cache."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

import kvpact

KINDS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
TOKENS = 71
HEADS = 2


def inputs(name: str, dim: int) -> torch.Tensor:
    """Return `[2, HEADS, TOKENS, dim]`, kinds of data that round differently."""
    generator = torch.Generator().manual_seed(dim)
    shape = (2, HEADS, TOKENS, dim)
    x = torch.randn(shape, generator=generator)
    if name == "spiky":
        return x * torch.where(torch.rand(shape, generator=generator) < 0.03, 300.0, 0.01)
    if name == "zero":
        return torch.zeros(shape)
    if name == "partly zero":
        return x * (torch.rand(*shape[:3], 1, generator=generator) < 0.5)
    if name == "tie":
        # Multiples of one half around a power of two: x / scale is often half way between codes,
        # and the largest magnitude often stands twice, with either sign.
        steps = torch.randint(-16, 17, shape, generator=generator).float()
        steps[..., ::32] = 16.0 * torch.sign(x[..., ::32])
        return steps / 2
    if name == "eighth":
        # 127 / 8 is the largest magnitude, so that the scale of q8_0 is exact and ties are ties.
        steps = torch.randint(-254, 255, shape, generator=generator).float() / 16
        steps[..., 5::32] = 127 / 8
        return steps
    if name == "tiny":
        return x * 1e-7  # scales among the subnormals of fp16
    if name == "large":
        return x * 1e5
    return x


def peer(x: torch.Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    return quants.dequantize(quants.quantize(x.numpy(), kind), kind)


@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name", ["normal", "spiky", "zero", "partly zero", "tie", "eighth", "tiny", "large"]
)
def test_values_equal_ggufs_bit_for_bit(spec, dim, name):
    x, other = inputs(name, dim), inputs("normal", dim)
    cache = kvpact.create_cache(spec, kvpact.CacheGeometry(1, HEADS, dim))
    # In pieces, and then one more token: what the result shows of the others is what is stored.
    for start, end in ((0, 40), (40, 41), (41, TOKENS)):
        cache.prefill(0, x[:, :, start:end], x.flip(1)[:, :, start:end])
    result = cache.prefill(0, other[:, :, :1], other[:, :, :1])
    for got, given in ((result.k, x), (result.v, x.flip(1))):
        wanted = peer(given, KINDS[spec])
        if name == "tiny":  # GGUF's scales lose them: theirs are the bytes of larger ones
            factor = 2.0 ** cache.entry(0).k.codec.power
            wanted = peer(given * factor, KINDS[spec]) / np.float32(factor)
        same = got[:, :, :TOKENS].numpy().view(np.int32) == wanted.view(np.int32)
        assert same.all(), f"{(~same).sum()} of {same.size} values differ"
        if name != "zero":
            assert not torch.equal(got[:, :, :TOKENS], given)  # it is the stored value that we see


def test_magnitudes_beyond_the_scale_are_refused_not_stored_as_infinity():
    x = torch.full((1, HEADS, 1, 64), 1e7)
    with np.errstate(over="ignore"):
        assert np.isinf(peer(x, KINDS["q4_0"])).all()
    cache = kvpact.create_cache("q4_0", kvpact.CacheGeometry(1, HEADS, 64))
    with pytest.raises(kvpact.errors.NonFiniteError, match="scale of a group"):
        cache.prefill(0, x, x)
    assert cache.seq_len(0) == 0
