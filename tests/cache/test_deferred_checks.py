"""A step on a device makes the host wait for nothing; what was not checked is told later."""

import pytest
import torch
from host_reads import HostReads
from torch.utils._python_dispatch import TorchDispatchMode

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.errors import BackendUnavailable, NonFiniteError

GEOMETRY = CacheGeometry(1, 2, 64, dtype=torch.float32)
SPECS = (
    "turboquant:bits=4", "turboquant:bits=4,center=64", "turboquant:bits=3,mode=prod", "int:bits=8",
    "int:bits=4,zero=true", "kivi:bits=2", "kvarn:bits=4", "fp8", "fp8:scale=none",
    "qjl/int:bits=4", "polarquant", "none", "none:dtype=fp16",
)  # fmt: skip


def tokens(count, generator, heads=2):
    return torch.randn(1, heads, count, 64, generator=generator)


def make(spec, layout="contiguous", **options):
    pages = {"num_pages": 16} if layout == "paged" else {}
    return create_cache(spec, GEOMETRY, layout, backend="torch", **pages, **options)


def step(cache, count, generator):
    k, v, q = (tokens(count, generator, heads) for heads in (2, 2, 4))
    return cache.attend(0, k=k, v=v, q=q)


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
@pytest.mark.parametrize("spec", SPECS)
def test_no_step_reads_from_the_device(spec, layout):
    outputs = []
    for check in ("now", "deferred"):
        generator = torch.Generator().manual_seed(0)
        cache = make(spec, layout, check=check)
        step(cache, 300, generator)
        with HostReads() as reads:
            found = [step(cache, count, generator) for count in (1, 1, 70, 1)]
        outputs.append(torch.cat(found, 2))
        assert bool(reads.counts) == (check == "now")
    assert torch.equal(*outputs)
    cache.verify()
    assert cache.stats()["tokens"] == 373


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_what_was_not_checked_is_told_at_the_next_natural_point(bad, layout):
    generator = torch.Generator().manual_seed(1)
    cache = make("turboquant:bits=4", layout, check="deferred")
    step(cache, 40, generator)
    cache.verify()
    k, v, q = (tokens(1, generator, heads) for heads in (2, 2, 4))
    v[0, 1, 0, 5] = bad
    cache.attend(0, k=k, v=v, q=q)
    step(cache, 1, generator)
    fork = cache.fork()
    for look in (cache.verify, cache.stats, cache.snapshot, fork.verify):
        with pytest.raises(NonFiniteError, match="deferred"):
            look()
    fork.reset()
    cache.reset()
    step(cache, 5, generator)
    cache.verify()


def test_numbers_beyond_the_range_of_a_method_are_told():
    generator = torch.Generator().manual_seed(2)
    for spec, size in (("turboquant:bits=4", 1e6), ("fp8:scale=none", 500.0), ("kivi:bits=2", 1e5)):
        cache = make(spec, check="deferred")
        x = tokens(1, generator) * size
        cache.store(0, k=x, v=x)
        with pytest.raises(NonFiniteError, match="deferred"):
            cache.verify()


def test_checks_at_any_other_time_are_refused():
    with pytest.raises(BackendUnavailable, match="now, deferred"):
        make("fp8", check="later")


def paged_rows(rows, spec="turboquant:bits=4"):
    cache = PagedKVCache(spec, GEOMETRY, 4 * rows, check="deferred", backend="torch")
    return cache, [cache.allocate() for _ in range(rows)]


@pytest.mark.parametrize("call", ["attend", "append"])
@pytest.mark.parametrize("bad", [torch.nan, 1e6])
def test_what_one_sequence_holds_is_told_of_that_one_alone(bad, call):
    """As it was: of every sequence of the batch, so that one bad request ended all."""
    cache, seqs = paged_rows(3)
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(3, 2, 40, 64, generator=generator) for _ in range(2))
    k[1, 1, 5] = bad
    if call == "attend":
        q = torch.randn(3, 4, 40, 64, generator=generator)
        cache.view(seqs).attend(0, k=k, v=v, q=q)
    else:
        cache.append(0, {seq: (k[i], v[i]) for i, seq in enumerate(seqs)})
    for good in (seqs[0], seqs[2]):
        cache.verify(good)
        cache.snapshot(good)
        cache.layer_of(good, 0).dequantize("k")
    for look in (cache.verify, lambda: cache.verify(seqs[1]), cache.view(seqs).verify):
        with pytest.raises(NonFiniteError, match=f"sequence {seqs[1]}, layer 0: .* deferred"):
            look()
    cache.free(seqs[1])
    cache.verify()


class Flags(TorchDispatchMode):
    """Counts the booleans that operations give."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.bool:
            self.count += found.numel()
        return found


def test_the_flags_of_a_step_are_as_many_as_its_rows():
    """As it was: each row looked at those of all rows before it."""
    counts = []
    for rows in (2, 4, 8):
        cache, seqs = paged_rows(rows, "int:bits=8")
        x = torch.ones(rows, 2, 40, 64)
        with Flags() as flags:
            cache.append(0, {seq: (x[i], x[i]) for i, seq in enumerate(seqs)})
        counts.append(flags.count)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
