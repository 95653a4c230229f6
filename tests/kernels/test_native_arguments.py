"""The arguments of native attention: what is kept from call to call is never out of date."""

import gc
from ctypes import sizeof

import pytest
import torch
from closeness import WHOLE_BOUND, error
from guards import guarded_outputs

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import structs
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

HEADS, GROUPS, DIM = 2, 2, 32
GEOMETRY = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
SPECS = ("turboquant:bits=4,window=8,sinks=2", "kivi:bits=2,group=32", "none:dtype=fp16")


class Twins:
    """A cache in torch and one with native kernels, to which the same happens."""

    def __init__(self, spec, layout="contiguous", batch=2, caches=None, seed=0):
        pages = {"num_pages": 64, "page_size": 32} if layout == "paged" else {}
        self.caches = caches or [
            create_cache(spec, GEOMETRY, layout, backend=name, **pages) for name in ("torch", "cpu")
        ]
        self.batch, self.generator = batch, torch.Generator().manual_seed(seed)

    def attend(self, new=1):
        k, v = torch.randn(2, self.batch, HEADS, new, DIM, generator=self.generator)
        q = torch.randn(self.batch, HEADS * GROUPS, new, DIM, generator=self.generator)
        with guarded_outputs(native):
            expected, found = (
                cache.attend(0, k=k, v=v, q=q, config=AttendConfig()) for cache in self.caches
            )
        assert error(expected, found) <= WHOLE_BOUND

    def same(self, change):
        for cache in self.caches:
            change(cache)

    def fork(self, seed):
        return Twins("", batch=self.batch, caches=[c.fork() for c in self.caches], seed=seed)


def test_the_call_is_the_structure_of_the_header():
    numbers = [i + 1 for i in range(len(structs.CALL.unpack(bytes(structs.CALL.size))))]
    fixed = (b"\x01" * structs.FIXED_BYTES, b"\x02" * structs.FIXED_BYTES)
    second = numbers.index(23)
    args = structs.AttendArgs.from_buffer_copy(
        structs.CALL.pack(fixed[0], *numbers[1:second], fixed[1], *numbers[second + 1 :])
    )
    assert sizeof(structs.AttendArgs) == structs.CALL.size
    assert (args.k.kind, args.v.kind) == (0x01010101, 0x02020202)
    assert (args.k.exact_from, args.k.tail.data, args.k.n_sinks) == (2, 3, 16)
    assert (args.k.offset.pairs, args.k.offset.origin) == (17, 22)
    assert (args.v.exact_from, args.v.sinks.token, args.batch) == (24, 36, 45)
    assert (args.scale, args.threads) == (numbers[-3], numbers[-1])


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
@pytest.mark.parametrize("spec", SPECS)
def test_every_change_between_two_calls(spec, layout):
    twins = Twins(spec, layout)
    for new in (3, 1, 90, 1, 40, 200):  # the window alone, first slots, new segments and pages
        twins.same(_filler(new, twins.batch))
        twins.attend()
        twins.attend(5)
    twins.attend(130)
    other = twins.fork(7)
    for _ in range(12):  # both sides write to what they share, windows further on
        twins.attend()
        other.attend()
    other.same(lambda cache: cache.truncate(100))
    for _ in range(3):
        other.attend()
        twins.attend()
    twins.same(lambda cache: cache.select(torch.tensor([1])))
    twins.batch = 1
    twins.attend()
    twins.same(lambda cache: cache.repeat(3))
    twins.batch = 3
    twins.attend()
    twins.same(lambda cache: cache.reorder(torch.tensor([2, 0, 0])))
    twins.attend()
    twins.same(lambda cache: cache.truncate(33))
    twins.attend()
    twins.same(lambda cache: cache.reset())
    del other
    gc.collect()
    twins.batch = 2
    twins.same(_filler(70, 2))
    for _ in range(2):
        twins.attend()


def _filler(new, batch):
    def fill(cache):
        generator = torch.Generator().manual_seed(new)
        cache.prefill(0, *torch.randn(2, batch, HEADS, new, DIM, generator=generator))

    return fill


def test_pages_that_other_sequences_take():
    caches = [
        PagedKVCache("int:bits=4,window=4", GEOMETRY, 8, 32, backend=name)
        for name in ("torch", "cpu")
    ]
    generator = torch.Generator().manual_seed(1)
    seqs = [0, 1]
    assert all([cache.allocate() for _ in seqs] == seqs for cache in caches)
    for turn in range(12):
        new = (60, 1, 1)[turn % 3]
        k, v = torch.randn(2, 2, HEADS, new, DIM, generator=generator)
        q = torch.randn(2, HEADS * GROUPS, new, DIM, generator=generator)
        outputs = []
        for cache in caches:
            view = cache.view(seqs)
            outputs.append(view.attend(0, k=k, v=v, q=q))
            if turn % 3 == 2:  # pages go back, and come again in another order
                cache.truncate(seqs[0], 31)
                cache.free(seqs[1])
                assert cache.allocate() == 2 + turn // 3
        assert error(*outputs) <= WHOLE_BOUND
        if turn % 3 == 2:
            seqs[1] = 2 + turn // 3


@pytest.mark.parametrize("spec", SPECS)
def test_a_view_lives_longer_than_its_cache_and_what_comes_later(spec):
    cache = create_cache(spec, GEOMETRY, backend="cpu")
    _filler(300, 2)(cache)
    k, v = torch.randn(2, 2, HEADS, 1, DIM, generator=torch.Generator().manual_seed(2))
    q = torch.randn(2, HEADS * GROUPS, 1, DIM, generator=torch.Generator().manual_seed(3))
    step = cache.store(0, k=k, v=v)
    before = step.attend(q, AttendConfig())
    for _ in range(150):
        cache.attend(0, k=v, v=k, q=q, config=AttendConfig())
    cache.fork().attend(0, k=k, v=k, q=q, config=AttendConfig())
    assert torch.equal(step.attend(q, AttendConfig()), before)
    del cache
    gc.collect()
    rubbish = [torch.full((2, HEADS, 128, DIM), torch.nan) for _ in range(64)]
    assert torch.equal(step.attend(q, AttendConfig()), before) and len(rubbish) == 64


def test_half_precision_tokens_and_strided_ones_stay_alive_during_the_call():
    twins = Twins("turboquant:bits=4,window=8,sinks=2")
    twins.same(_filler(90, 2))
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        k, v = torch.randn(2, 2, DIM, HEADS, 1, generator=generator).permute(0, 1, 3, 4, 2)
        q = torch.randn(2, DIM, HEADS * GROUPS, 1, generator=generator).permute(0, 2, 3, 1)
        padding = torch.tensor([0, 3], dtype=torch.int32)
        config = AttendConfig(padding=padding, sink_logits=torch.ones(HEADS * GROUPS).double())
        expected, found = (
            cache.attend(0, k=k, v=v, q=q.half(), config=config) for cache in twins.caches
        )
        assert found.dtype == torch.float16
        assert error(expected.float(), found.float()) <= 1e-3
