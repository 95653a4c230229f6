"""The first tokens of a layer like another one's, in one call, against the ordinary way."""

import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.cache.layer.prompt import Prompt
from kvpact.errors import CacheFull, GeometryError, KernelError, NonFiniteError
from kvpact.kernels import native_threads
from kvpact.kernels.cpu import library, prompt
from kvpact.testing import same_bytes

needs_native = pytest.mark.skipif(
    native_threads() == "no native calls", reason="the ordinary way is the only one"
)
SHAPES = ((1, 3, 3, 64, 64), (2, 1, 4, 128, 96), (3, 2, 1, 32, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(shape, tokens, dtype, seed, strided):
    batch, heads, groups, dim, v_dim = shape
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, count, width in (("k", heads, dim), ("v", heads, v_dim), ("q", heads * groups, dim)):
        x = torch.randn(batch, tokens, count, width, generator=generator).to(dtype).transpose(1, 2)
        found[name] = x if strided else x.contiguous()
    return found


def new_cache(spec, shape, dtype, layers=3, **options):
    _, heads, _, dim, v_dim = shape
    geometry = CacheGeometry(layers, heads, dim, v_head_dim=v_dim, dtype=dtype)
    return create_cache(spec, geometry, **options)


@pytest.fixture
def taken(monkeypatch):
    """Name the calls that stored layers in one, with memory filled with NaN."""
    names, empty = [], torch.Tensor.new_empty

    def counted(name, call):
        def named(self, *args):
            found = call(self, *args)
            names.append((name, found is not None))
            return found

        return named

    def spoilt(count, dtype):
        return torch.full((count,), torch.nan, dtype=dtype)

    for name in ("take", "attend"):
        monkeypatch.setattr(Prompt, name, counted(name, getattr(Prompt, name)))
    monkeypatch.setattr(prompt, "new_state", spoilt)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *s: empty(x, *s).fill_(torch.nan))
    return names


@needs_native
@pytest.mark.parametrize("spec", [
    *("trellis:bits=4", "trellis:bits=2", "trellis:bits=3,weights=false,blocks=false"),
    *("turboquant:bits=4", "int:bits=8", "kivi:bits=2", "fp8", "int:bits=8,sinks=0,window=0"),
    "trellis:bits=4,sinks=0",
])  # fmt: skip
def test_a_layer_like_another_one_holds_what_it_would_hold_alone(spec, taken):
    dtypes, strided = itertools.cycle(DTYPES), itertools.cycle((True, False))
    for shape, tokens in itertools.product(SHAPES, (1, 20, 64, 71, 95, 100, 127, 128, 300, 700)):
        dtype = next(dtypes)
        cache = new_cache(spec, shape, dtype)
        cache.attend(0, **made(shape, tokens, dtype, 1, next(strided)))
        alone = [new_cache(spec, shape, dtype) for _ in range(2)]
        for layer, one in enumerate(alone, 1):
            other = made(shape, tokens, dtype, 1 + layer, next(strided))
            wanted = one.attend(0, **other)
            del taken[:]
            assert torch.equal(cache.attend(layer, **other), wanted)
            # One token, and queries that wait for a codec to learn from them: the ordinary way.
            ordinary = tokens == 1 or (spec.startswith("trellis") and 96 < tokens < 128)
            assert taken == ([] if ordinary else [(("take", "attend")[layer - 1], True)])
            for x, y in zip(cache.entry(layer).tensors(), one.entry(0).tensors(), strict=True):
                assert same_bytes(x.contiguous(), y.contiguous())
        step = made(shape, 1, dtype, 4, strided=False)
        for layer, one in enumerate(alone, 1):
            for _ in range(70):
                assert torch.equal(cache.attend(layer, **step), one.attend(0, **step))
            for side in "kv":
                assert same_bytes(cache.dequantize(layer, side), one.dequantize(0, side))


def begun(layers, spec="trellis:bits=4", **options):
    """Return a cache of 9 layers with first tokens in some, one without any, and others for it."""
    like = spec, SHAPES[0], torch.float32, 9
    cache, alone = (new_cache(*like, **options) for _ in range(2))
    for layer in range(layers):
        cache.attend(layer, **made(SHAPES[0], 200, torch.float32, 1 + layer, strided=True))
    return cache, alone, made(SHAPES[0], 200, torch.float32, 1 + layers, strided=True)


@needs_native
@pytest.mark.parametrize("layer", [1, 2])
def test_a_prompt_that_fails_leaves_the_layer_as_it_was(layer, monkeypatch):
    cache, alone, other = begun(layer)
    with monkeypatch.context() as patched:
        patched.setattr(library(), "prompt", lambda *_: 2)
        with pytest.raises(KernelError, match="nothing is stored"):
            cache.attend(layer, **other)
    with monkeypatch.context() as patched:
        patched.setattr(library(), "prompt", lambda *_: 3)
        with pytest.raises(MemoryError):
            cache.attend(layer, **other)
    assert cache.seq_len(layer) == 0
    assert torch.equal(cache.attend(layer, **other), alone.attend(0, **other))


@needs_native
@pytest.mark.parametrize("spec", ["trellis:bits=4", "none"])
@pytest.mark.parametrize("name, number", [("k", torch.nan), ("v", torch.inf), ("q", 1.1e31)])
def test_later_layers_are_checked_as_the_first_one(name, number, spec):
    cache, alone, other = begun(3, spec)
    wrong = {**other, name: other[name].clone()}
    wrong[name][0, 0, 77, 5] = number
    with pytest.raises(NonFiniteError, match=f"^{name} holds NaN or infinity"):
        cache.attend(3, **wrong)
    batch = {side: x.repeat(2, 1, 1, 1) for side, x in other.items()}
    with pytest.raises(GeometryError, match="batch 2"):
        cache.attend(3, **batch)
    small = {side: x * (1e-8 if side != "q" else 1) for side, x in other.items()}
    outputs = cache.attend(3, **small), cache.attend(4, **other)
    wanted = alone.attend(3, **small), alone.attend(4, **other)
    assert all(map(torch.equal, outputs, wanted))
    for layer, side in itertools.product((3, 4), "kv"):
        assert same_bytes(cache.dequantize(layer, side), alone.dequantize(layer, side))


@needs_native
def test_later_layers_attend_as_their_own_calls_ask(taken):
    cache, alone, other = begun(3, max_tokens=210)
    for layer, config in (3, AttendConfig(sliding_window=9)), (4, AttendConfig(softmax_scale=0.2)):
        outputs = [x.attend(layer, **other, config=config) for x in (cache, alone)]
        assert torch.equal(*outputs)
    with pytest.raises(CacheFull):
        cache.attend(5, **made(SHAPES[0], 211, torch.float32, 7, strided=True))
    # Where no other layer has tokens, a layer with other rows than before begins anew.
    for layer in range(5):
        cache.reset(layer)
    cache.attend(0, **made((2, *SHAPES[0][1:]), 200, torch.float32, 8, strided=True))
    with pytest.raises(GeometryError, match="batch 1"):
        cache.attend(6, **other)


@needs_native
def test_where_what_is_learnt_is_no_number_the_ordinary_way_decides(monkeypatch):
    cache, alone = (new_cache("trellis:bits=4", SHAPES[0], torch.float32) for _ in range(2))
    first, other = (made(SHAPES[0], 128, torch.float32, seed, strided=False) for seed in (1, 2))
    cache.attend(0, **first)
    real, statuses = library().prompt, []

    def no_number_at_first(*args):
        statuses.append(4 if not statuses else real(*args))
        return statuses[-1]

    monkeypatch.setattr(library(), "prompt", no_number_at_first)
    output = cache.attend(1, **other)
    assert statuses == [4, 0]
    assert torch.equal(output, alone.attend(0, **other))


@needs_native
def test_nothing_that_was_made_ahead_outlives_the_prompt():
    cache = new_cache("trellis:bits=4", SHAPES[0], torch.float32, layers=6)
    for layer in range(3):
        cache.attend(layer, **made(SHAPES[0], 200, torch.float32, layer, strided=True))
    assert cache.compute.prompts
    cache.attend(0, **made(SHAPES[0], 1, torch.float32, 9, strided=True))
    assert not cache.compute.prompts
    other = made(SHAPES[0], 300, torch.float32, 4, strided=True)
    alone = new_cache("trellis:bits=4", SHAPES[0], torch.float32)
    assert torch.equal(cache.attend(3, **other), alone.attend(0, **other))


@needs_native
def test_layers_may_be_given_to_threads():
    layers, shape = 24, SHAPES[0]
    cache, alone = (new_cache("trellis:bits=4", shape, torch.float32, layers) for _ in range(2))
    given = [made(shape, 150, torch.float32, layer, strided=True) for layer in range(layers)]
    cache.attend(0, **given[0])
    start, found = threading.Barrier(4), {}

    def work(first):
        start.wait()
        for layer in range(first, layers, 4):
            if layer:
                found[layer] = cache.attend(layer, **given[layer])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for layer in range(1, layers):
        assert torch.equal(found[layer], alone.attend(layer, **given[layer]))


@needs_native
def test_a_copy_between_a_prompt_and_a_step_goes_on_alone():
    shape = SHAPES[0]
    cache = new_cache("trellis:bits=4", shape, torch.float32)
    for layer in range(2):
        cache.attend(layer, **made(shape, 150, torch.float32, layer, strided=True))
    fork, other = cache.fork(), copy.deepcopy(cache)
    third = made(shape, 150, torch.float32, 5, strided=True)
    outputs = [one.attend(2, **third) for one in (cache, fork, other)]
    step = made(shape, 1, torch.float32, 6, strided=False)
    for one in (cache, fork, other):
        outputs.append(one.attend(2, **step))
    assert all(torch.equal(outputs[0], x) for x in outputs[:3])
    assert all(torch.equal(outputs[3], x) for x in outputs[3:])
