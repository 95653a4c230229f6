"""Steps in one native call leave and return what the ordinary way does, to the bit."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache
from kvpact.cache.batch import contiguous
from kvpact.cache.paged import view as paged_view
from kvpact.errors import CacheFull, GeometryError, NonFiniteError, SequenceError
from kvpact.kernels.cpu import attend
from kvpact.kernels.cpu import step as native
from kvpact.kernels.cpu.library import _load
from kvpact.testing import random_offset
from kvpact.testing.data import by_name

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

SPECS = (
    "turboquant:bits=4", "turboquant:bits=3,window=5,sinks=3",
    "turboquant:bits=2,center=64,window=9", "int:bits=8/kivi:bits=2",
    "int:bits=4,zero=true,window=40/fp8", "kivi:bits=2,window=16/kvarn:bits=3,group=32",
)  # fmt: skip
GEOMETRY = CacheGeometry(2, 2, 48, dtype=torch.float32)


def random(count, batch=1, dtype=torch.float32, geometry=GEOMETRY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, geometry.num_kv_heads, count, geometry.head_dim)
    k, v = torch.randn(2, *shape, generator=generator).to(dtype)
    q = torch.randn(batch, 3 * shape[1], *shape[2:], generator=generator).to(dtype)
    return k, v, q


class Watched:
    """Counts the quick steps, or refuses to take any."""

    def __init__(self, monkeypatch):
        self.taken, self.allowed = 0, True
        for module, name in ((contiguous, "quick_attend"), (paged_view, "quick_rows")):
            monkeypatch.setattr(module, name, self.watched(getattr(module, name)))

    def watched(self, real):
        def quick(*args):
            output = real(*args) if self.allowed else None
            self.taken += output is not None
            return output

        return quick


@pytest.fixture
def watched(monkeypatch):
    def poisoned(*shape):
        return torch.full(shape, torch.nan)

    monkeypatch.setattr(attend, "new_output", poisoned)
    return Watched(monkeypatch)


def same_outputs(watched, caches, *given, **options):
    """Attend in both caches, quickly in the first one alone, and compare."""
    outputs = []
    for cache, watched.allowed in zip(caches, (True, False), strict=True):
        outputs.append(cache.attend(*given, **options))
    assert torch.equal(*outputs)


def same_state(a, b):
    """Whether two caches hold the same bytes: slots, side information, sinks, exact tokens."""
    for one, other in zip(a._layers, b._layers, strict=True):
        for left, right in zip(one.streams(), other.streams(), strict=True):
            assert (left.packed, left.tail_start) == (right.packed, right.tail_start)
            assert torch.equal(left.tail, right.tail)
            assert (left.sinks is None) or torch.equal(left.sinks, right.sinks)
            for field in left.codec.fields:
                both = (stream.store.tensors(field.name) for stream in (left, right))
                for x, y in zip(*both, strict=True):
                    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), field.name
        assert one.clean and other.clean


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("spec", SPECS)
def test_a_history_of_steps(spec, dtype, watched):
    """Prompts, steps of 1 to 4 tokens, rollbacks, forks: outputs and state of both ways."""
    check_history(spec, dtype, watched, {})


@pytest.mark.parametrize(("spec", "dtype"), [
    ("turboquant:bits=4", torch.bfloat16),
    ("turboquant:bits=3,window=5,sinks=3", torch.float32),
    ("kivi:bits=2,window=16/int:bits=8", torch.float16),
])  # fmt: skip
def test_a_history_of_steps_of_keys_with_an_offset(spec, dtype, watched):
    """Their offset is taken off natively, to the same bytes."""
    offsets = {0: random_offset(2, 48, norm=50, seed=1), 1: random_offset(2, 48, norm=50, seed=2)}
    check_history(spec, dtype, watched, offsets)


def check_history(spec, dtype, watched, offsets):
    geometry = replace(GEOMETRY, dtype=dtype)
    quick, plain = (create_cache(spec, geometry, key_offsets=offsets) for _ in range(2))
    history = [(2, 1), (1, 12), (70, 1), (1, 75), (3, 9), (2, 1), (2, 12), (1, 30)]
    seed = 0
    for turn, (count, times) in enumerate(history):
        for _ in range(times):
            for layer in range(2):
                seed += 1
                given = by_name(*random(count, 2, dtype, seed=seed))
                same_outputs(watched, (quick, plain), layer, **given)
        same_state(quick, plain)
        if turn == 4:
            quick, plain = quick.fork(), plain.fork()
        if turn == 5:
            for cache in (quick, plain):
                cache.truncate(150)
                cache.select(torch.tensor([1, 0]))
    assert watched.taken > 0.6 * 2 * sum(times for _, times in history)
    assert quick.seq_len() == plain.seq_len()
    assert quick.stats()["compute"]["attend"] == plain.stats()["compute"]["attend"]
    assert quick.stats()["compute"]["encode"] == plain.stats()["compute"]["encode"]


@pytest.mark.parametrize("spec", SPECS)
def test_sequences_on_pages(spec, watched):
    """Rows of unlike length, pages that forks share, rollbacks: outputs and state of both ways."""
    pools = [PagedKVCache(spec, GEOMETRY, num_pages=60) for _ in range(2)]
    views = []
    for pool, watched.allowed in zip(pools, (True, False), strict=True):
        seqs = [pool.allocate() for _ in range(3)]
        for i, seq in enumerate(seqs):
            for layer in range(2):
                pool.view([seq]).attend(layer, **by_name(*random(20 + 30 * i, seed=i)))
        views.append(pool.view([*seqs, pool.fork(seqs[1])]))
    for step in range(120):
        if step == 60:
            for view in views:
                view.cache.truncate(view.seqs[0], 41)
        if step == 80:
            forks = [view.fork() for view in views]
            views, forks = forks, views
        for layer in range(2):
            same_outputs(watched, views, layer, **by_name(*random(1, 4, seed=step)))
    assert watched.taken > 0.75 * 2 * 120  # not while a group is cut
    for view in views:
        assert [view.cache.seq_len(seq) for seq in view.seqs] == [101, 170, 200, 170]
    left, right = (pool.stats() for pool in pools)
    assert left["compute"]["attend"] == right["compute"]["attend"]
    assert pools[0].pool.num_free == pools[1].pool.num_free
    for one, other in zip(*(pool._sequences.values() for pool in pools), strict=True):
        assert one.table == other.table
        for a, b in zip(one.layers, other.layers, strict=True):
            for x, y in zip(a.streams(), b.streams(), strict=True):
                assert torch.equal(x.tail, y.tail) and x.packed == y.packed
    for x, y in zip(*(pool.pool.tensors() for pool in pools), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_views_that_share_sequences_take_turns(watched):
    """What is known of the last rows is not taken for what holds now."""
    pools = [PagedKVCache(SPECS[1], GEOMETRY, num_pages=40, page_size=32) for _ in range(2)]
    groups = ([0, 1], [1, 2], [2, 0, 1], [0, 1], [3, 1])
    for pool in pools:
        for seq in pool.allocate_rows(4):
            pool.view([seq]).attend(0, **by_name(*random(25 + seq, seed=seq)))
    for step in range(60):
        if step == 40:
            for pool in pools:
                pool.truncate(1, 50)
        group = groups[step % 5]
        views = [pool.view(group) for pool in pools]
        same_outputs(watched, views, 0, **by_name(*random(1, len(group), seed=step)))
    assert watched.taken > 40
    watched.allowed = True
    view = pools[0].view([0, 1])
    pools[0].free(1)
    with pytest.raises(SequenceError, match="was freed"):
        view.attend(0, **by_name(*random(1, 2)))
    assert [pools[0].seq_len(seq) for seq in (0, 2)] == [pools[1].seq_len(seq) for seq in (0, 2)]
    for x, y in zip(*(pool.pool.tensors() for pool in pools), strict=True):
        for row in (0, 2, 3):
            for page in pools[1]._sequences[row].table:
                assert torch.equal(x[page].view(torch.uint8), y[page].view(torch.uint8))


def interrupted(monkeypatch, call):
    """Make a call that Ctrl-C ends just after the native steps."""
    real = native.CpuStep.run

    def interrupt(*args):
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(native.CpuStep, "run", interrupt)
        call()


def stepped_pages():
    """Return a pool, and two rows of 32 tokens in it."""
    pool = PagedKVCache("turboquant:bits=4", GEOMETRY, num_pages=9, page_size=32)
    view = pool.view([pool.allocate(), pool.allocate()])
    for count in (29, 1, 1, 1):
        for layer in range(2):
            view.attend(layer, **by_name(*random(count, 2)))
    return pool, view


def test_a_step_on_pages_that_is_refused_or_interrupted_changes_nothing(watched, monkeypatch):
    pool, view = stepped_pages()
    free, tensors = pool.pool.num_free, [x.clone() for x in pool.pool.tensors()]
    k, v, q = random(1, 2)
    with pytest.raises(NonFiniteError):
        view.attend(0, k=k, v=torch.where(v == v[1, 1, 0, 1], torch.nan, v), q=q)
    interrupted(monkeypatch, lambda: view.attend(0, k=k, v=v, q=q))
    assert pool.pool.num_free == free and view.seq_len(0) == 32
    for x, y in zip(tensors, pool.pool.tensors(), strict=True):
        held = x.view(torch.uint8) != 0
        assert torch.equal(x.view(torch.uint8)[held], y.view(torch.uint8)[held])
    view.attend(0, k=k, v=v, q=q)
    other, rows = stepped_pages()
    rows.attend(0, k=k, v=v, q=q)
    for x, y in zip(other.pool.tensors(), pool.pool.tensors(), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_quick_step_knows_the_limit_of_each_side(watched, side):
    """What one side's codec can't hold is refused, though the other side's could hold it."""
    small, large = "fp8:scale=none,window=3", "int:bits=4,window=3"
    spec = f"{small}/{large}" if side == "k" else f"{large}/{small}"
    cache = create_cache(spec, GEOMETRY)
    k, v, q = random(90)
    cache.prefill(0, k[:, :, :70], v[:, :, :70])
    for t in range(70, 80):
        cache.attend(0, k=k[:, :, t : t + 1], v=v[:, :, t : t + 1], q=q[:, :, t : t + 1])
    taken, last = watched.taken, {"k": k[:, :, 80:81], "v": v[:, :, 80:81]}
    last[side] = torch.full_like(last[side], 1e5)
    with pytest.raises(NonFiniteError):
        cache.attend(0, **last, q=q[:, :, 80:81])
    assert taken > 0 and cache.seq_len(0) == 80


@pytest.mark.parametrize("case", ("padding", "views", "rules", "latent"))
def test_calls_of_other_shapes(case, watched):
    """Left padding, tokens in views, rules of the call, latents."""
    geometry = CacheGeometry.mla(1, 40, 16) if case == "latent" else GEOMETRY
    latent = "turboquant:bits=4/int:bits=8"
    spec = latent if case == "latent" else "turboquant:bits=4,sinks=2,window=8"
    caches = [create_cache(spec, geometry) for _ in range(2)]
    for step in range(30):
        count = 40 if step == 0 else 1
        generator = torch.Generator().manual_seed(step)
        if case == "latent":
            k, v = (torch.randn(1, 1, count, d, generator=generator) for d in (40, 16))
            q = torch.randn(1, 4, count, 56, generator=generator)
            config = AttendConfig(softmax_scale=0.2)
        else:
            k, v, q = random(count, 2, seed=step)
            config = AttendConfig(sliding_window=30, softcap=3.0) if case == "rules" else None
        if case == "views":
            k, v, q = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, q))
        if case == "padding" and step == 0:
            config = AttendConfig(padding=torch.tensor([0, 7]))
        same_outputs(watched, caches, 0, k=k, v=v, q=q, config=config)
    same_state(*caches)
    assert watched.taken >= 24


def stepped(spec="turboquant:bits=4", **options):
    cache = create_cache(spec, GEOMETRY, **options)
    for count in (40, 1, 1, 1):
        cache.attend(0, **by_name(*random(count)))
    return cache


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, 1e30))
@pytest.mark.parametrize("which", (0, 1, 2))
def test_numbers_that_can_not_be_stored_change_nothing(which, wrong, watched):
    cache, other = stepped(), stepped()
    tokens = [x.clone() for x in random(1)]
    tokens[which][0, 1, 0, 3] = wrong
    taken = watched.taken
    if which == 2 and wrong == 1e30:
        cache.attend(0, **by_name(*tokens))  # a query may be large
        other.attend(0, **by_name(*tokens))
    else:
        with pytest.raises(NonFiniteError):
            cache.attend(0, **by_name(*tokens))
        assert watched.taken == taken
    same_state(cache, other)
    assert torch.equal(*(x.attend(0, **by_name(*random(1))) for x in (cache, other)))


def test_an_interrupt_after_the_native_call_leaves_the_layer_as_it_was(watched, monkeypatch):
    cache, other = stepped(), stepped()
    interrupted(monkeypatch, lambda: cache.attend(0, **by_name(*random(1, seed=1))))
    assert cache.seq_len() == other.seq_len()
    assert torch.equal(*(x.attend(0, **by_name(*random(1, seed=2))) for x in (cache, other)))
    same_state(cache, other)


def test_other_calls_take_the_ordinary_way(watched):
    cache = stepped(max_tokens=44)
    k, v, q = random(1)
    taken = watched.taken
    with pytest.raises(GeometryError):
        cache.attend(0, k=k, v=v, q=q[..., :20])
    with pytest.raises(GeometryError):
        cache.attend(0, k=k.expand(2, -1, -1, -1), v=v, q=q)
    config = AttendConfig(mask=torch.ones(1, 1, 1, 44, dtype=torch.bool))
    cache.attend(0, k=k, v=v, q=q, config=config)
    assert watched.taken == taken
    with pytest.raises(CacheFull):
        cache.attend(0, k=k, v=v, q=q)
    assert cache.seq_len() == 44


def test_a_quick_step_beyond_the_limit_is_refused(watched):
    cache = stepped(max_tokens=43)
    assert watched.taken
    with pytest.raises(CacheFull):
        cache.attend(0, **by_name(*random(1)))
    assert cache.seq_len() == 43


def test_steps_that_attend_new_tokens_as_stored(watched):
    """Quick steps attend them as given: these are not of their kind."""
    caches = [create_cache("int:bits=3,sinks=0,window=0", GEOMETRY) for _ in range(2)]
    config = AttendConfig(exact_new=False)
    for step in range(5):
        given = by_name(*random(1 if step else 40, seed=step))
        same_outputs(watched, caches, 0, **given, config=config)
    same_state(*caches)


def test_a_copy_and_a_pickle_have_plans_of_their_own(watched):
    cache = stepped()
    other, held = copy.deepcopy(cache), cache._layers[0]._held
    assert held.runner is not None or cache._layers[0]._held.runner is None
    assert pickle.loads(pickle.dumps(held.runner)) is None
    outputs = [one.attend(0, **by_name(*random(1, seed=i))) for i, one in enumerate((cache, other))]
    assert not torch.equal(*outputs)
    assert cache.seq_len() == other.seq_len() == 44


def test_a_tail_takes_as_many_bytes_after_quick_steps(watched):
    """Steps of several tokens that pack a group across its end, at all places in the room."""
    caches = [create_cache("kivi:bits=2,window=0", GEOMETRY) for _ in range(2)]
    for seed, count in enumerate([600] + [3] * 60):
        for layer in range(2):
            for cache, watched.allowed in zip(caches, (True, False), strict=True):
                cache.attend(layer, **by_name(*random(count, seed=2 * seed + layer)))
        same_state(*caches)
        assert caches[0].memory_usage() == caches[1].memory_usage()
    assert watched.taken > 60
