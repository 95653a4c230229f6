"""The compressor: every method both ways, appending, and an extended basis."""

import pytest
import torch
from matrix import class_specs
from one_layer import normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvpact
from kvpact.errors import GeometryError, NonFiniteError
from kvpact.testing.held import held_bytes, same_bytes

# Limits of the normalised error of N(0, 1) tokens.
METHODS = {
    "none": 0.0, "fp8": 0.001, "int:bits=4": 0.01, "turboquant:bits=3": 0.04,
    "turboquant:bits=3,mode=prod": 0.08, "turboquant:bits=3,center=64": 0.04, "kivi:bits=4": 0.01,
    "kvarn:bits=4": 0.01, "int:bits=8/turboquant:bits=4": 0.011, "q8_0": 0.0001,
    "lowrank:rank=200": 0.0, "lowrank:rank=32,per_head=false": 0.75, "lowrank:energy=0.9": 0.11,
    "vq": 0.12, "vq:codebook_size=60,dims=3,stages=2": 0.014, "hybrid:rank=200": 0.02,
    "hybrid:rank=64,quant_bits=8": 0.4,
}  # fmt: skip
GROUPED = {"turboquant:bits=3,center=64": 64, "kivi:bits=4": 32, "kvarn:bits=4": 128}
each_method = pytest.mark.parametrize("method", METHODS)
each_class = pytest.mark.parametrize("method", class_specs(METHODS))


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_there_and_back(method: str, dtype: torch.dtype):
    k, v = normal(2, 3, 141, 80).to(dtype), normal(2, 3, 141, 64, seed=1).to(dtype)
    compressor = kvpact.KVCacheCompressor(method)
    compressed = compressor.compress_kv(k, v)
    again = compressor.decompress_kv(compressed)
    assert (compressed.tokens, compressed.dtype, compressed.layout) == (141, dtype, "batched")
    for x, y, error in zip((k, v), again, compressed.error, strict=True):
        assert (y.shape, y.dtype) == (x.shape, dtype)
        lost = (y.double() - x.double()).square().sum() / x.double().square().sum()
        assert float(lost) == pytest.approx(error, rel=1e-6, abs=1e-12)
        assert error <= METHODS[method]
    assert held_bytes(compressed) == compressed.nbytes
    assert compressed.bits_per_value == 8 * compressed.nbytes / (k.numel() + v.numel())
    rest = 141 % GROUPED.get(method, 1)
    assert same_bytes(again[0][:, :, 141 - rest :], k[:, :, 141 - rest :])


class Made(TorchDispatchMode):
    """Counts the bytes that operations write to memory of their own."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.size += result.nbytes
        return result


@each_class
def test_an_append_costs_the_same_however_much_is_held(method: str):
    compressor, x, sizes = kvpact.KVCacheCompressor(method), normal(1, 2, 1, 64), []
    for held in (1280, 5120):
        compressed = compressor.compress_kv(normal(1, 2, held, 64), normal(1, 2, held, 64))
        with Made() as made:
            for _ in range(3):
                compressed = compressed.append(x, x, bound=1)
        sizes.append(made.size)
    assert sizes[1] <= 1.1 * sizes[0]


@each_class
def test_an_append_shares_full_segments_and_writes_to_none_that_another_has(method: str):
    x = normal(1, 2, 1, 64)
    tokens = normal(1, 2, 700, 64)
    first = kvpact.KVCacheCompressor(method).compress_kv(tokens, tokens)
    for held in (first, kvpact.CompressedKV.from_bytes(first.to_bytes())):
        before, steps = held.to_bytes(), [held]
        for _ in range(3):
            steps.append(steps[-1].append(x, x, bound=1))
        for side in ("k", "v"):
            streams = [getattr(step, side).stream for step in steps]
            full = streams[0].packed // streams[0].store.segment_tokens
            assert full >= 3
            for field in streams[0].codec.fields:
                lie = [[x[field.name] for x in s.store.held_parts()] for s in streams]
                places = [[x.data_ptr() for x in segments] for segments in lie]
                assert all(place[:full] == places[0][:full] for place in places)
        assert held.to_bytes() == before


@each_method
def test_appends_to_one_and_the_same_stay_apart(method: str):
    compressor = kvpact.KVCacheCompressor(method)
    tokens = [normal(1, 2, n, 64, seed=n) for n in (200, 30, 140, 7)]
    first = compressor.compress_kv(tokens[0], tokens[0]).append(tokens[1], tokens[1], bound=1)
    before = first.to_bytes()
    longer = [first.append(x, x, bound=1) for x in tokens[2:]]
    assert first.to_bytes() == before
    for other, x in zip(longer, tokens[2:], strict=True):
        alone = kvpact.CompressedKV.from_bytes(before).append(x, x, bound=1)
        k, v = other.decompress()
        assert same_bytes(k, alone.decompress()[0]) and same_bytes(v, alone.decompress()[1])
        assert held_bytes(other) == other.nbytes


@each_method
def test_without_a_batch(method: str):
    k, v = normal(3, 70, 64), normal(3, 70, 96, seed=1)
    compressor = kvpact.KVCacheCompressor(method)
    compressed = compressor.compress_kv_3d(k, v)
    assert (compressed.k_shape, compressed.v_shape) == (k.shape, v.shape)
    unbatched, batched = (f(compressed) for f in (compressor.decompress_kv_3d,
                                                  compressor.decompress_kv))  # fmt: skip
    assert [x.shape for x in unbatched] == [k.shape, v.shape]
    one = compressor.compress_kv(k.unsqueeze(0), v.unsqueeze(0))
    for x, y, z in zip(unbatched, batched, compressor.decompress_kv_3d(one), strict=True):
        assert same_bytes(x, y[0]) and same_bytes(x, z)


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith(("low", "vq", "hyb"))])
def test_pieces_are_the_whole(method: str):
    k, v = normal(1, 2, 200, 64), normal(1, 2, 200, 64, seed=1)
    whole = kvpact.KVCacheCompressor(method).compress_kv(k, v)
    pieces = kvpact.KVCacheCompressor(method).compress_kv(k[:, :, :7], v[:, :, :7])
    for start, end in ((7, 100), (100, 101), (101, 200)):
        pieces = pieces.append(k[:, :, start:end], v[:, :, start:end])
    assert whole.tensors().keys() == pieces.tensors().keys()
    assert all(same_bytes(x, pieces.tensors()[name]) for name, x in whole.tensors().items())


def rank(*shape: int, of: int, seed: int) -> Tensor:
    return normal(*shape[:-1], of, seed=seed) @ normal(of, shape[-1], seed=seed + 1)


def test_a_basis_is_extended_when_new_tokens_leave_it():
    k, v = rank(1, 2, 100, 64, of=8, seed=1), rank(1, 2, 100, 64, of=8, seed=3)
    more = rank(1, 2, 50, 64, of=4, seed=5)
    first = kvpact.KVCacheCompressor(kvpact.LowRank(rank=8)).compress_kv(k, v)
    same = first.append(k[:, :, :50], v[:, :, :50])
    assert same.tensors()["k.state.basis"].shape[-1] == 8
    extended = first.append(more, v[:, :, :50])
    assert extended.tensors()["k.state.basis"].shape[-1] in range(9, 13)
    assert extended.tensors()["v.state.basis"].shape[-1] == 8 and extended.error.k < 1e-3
    got = extended.decompress()[0]
    torch.testing.assert_close(got[:, :, :100], first.decompress()[0], rtol=0, atol=1e-5)
    frozen = first.append(more, v[:, :, :50], bound=1.0)
    assert frozen.tensors()["k.state.basis"].shape[-1] == 8 and frozen.error.k > 0.1
    # An impossible bound ends at the full width.
    full = first.append(normal(1, 2, 80, 64), v[:, :, :80], bound=0.0)
    assert full.tensors()["k.state.basis"].shape[-1] == 64 and full.error.k < 1e-8
    with pytest.raises(GeometryError):
        first.append(more, v[:, :, :50], bound=2.0)


def test_a_refused_append_changes_nothing():
    k, v = normal(1, 2, 40, 64), normal(1, 2, 40, 64, seed=1)
    for method in ("int:bits=4", "hybrid:rank=64"):
        compressed = kvpact.KVCacheCompressor(method).compress_kv(k, v)
        with pytest.raises(NonFiniteError):
            compressed.append(k, v * 1e30)
        assert compressed.tokens == 40


def test_quant_bits_fill_in_for_a_hybrid_without():
    texts = ("hybrid", "hybrid:rank=8", "hybrid:quant_bits=4", "vq/hybrid")
    specs = [kvpact.KVCacheCompressor(text, quant_bits=8).spec for text in texts]
    assert [spec.value.quant_bits for spec in specs] == [8, 8, 4, 8]
    spec = kvpact.KVCacheCompressor(kvpact.Hybrid(quant_bits=4), quant_bits=8).spec
    assert spec.key.quant_bits == 4
    assert kvpact.KVCacheCompressor("vq").quant_bits == 8
    spec = kvpact.KVCacheCompressor("hybrid/hybrid:quant_bits=4", quant_bits=8).spec
    assert (spec.key.quant_bits, spec.value.quant_bits) == (8, 4)


@pytest.mark.parametrize(
    "method", [kvpact.LowRank(rank=3), kvpact.VectorQuantization(seed=1), kvpact.parse_spec("q8_0")]
)
def test_method_is_what_was_given(method):
    assert kvpact.KVCacheCompressor(method).method == method
    spec = method if isinstance(method, kvpact.Spec) else kvpact.Spec(method, method)
    assert kvpact.KVCacheCompressor(str(spec)).method == spec
