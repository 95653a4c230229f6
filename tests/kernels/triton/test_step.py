"""Steps carried out on the device give what the ordinary way gives, slots and all."""

import pytest
import torch
from host_reads import HostReads
from launches import Launches

pytest.importorskip("triton")

from kvpact import CacheGeometry, create_cache
from kvpact.cache.paged.view import PagedView
from kvpact.errors import NonFiniteError
from kvpact.kernels.triton.digits import fast
from kvpact.kernels.triton.step import step
from kvpact.testing.data import by_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = (
    "turboquant:bits=4", "int:bits=8,window=0,sinks=0", "kivi:bits=2,group=32",
    pytest.param("int:bits=4/turboquant:bits=2,window=5", marks=pytest.mark.slow),
    pytest.param("fp8:window=3,sinks=2", marks=pytest.mark.slow),
    pytest.param("turboquant:bits=3,center=64/int:bits=8", marks=pytest.mark.slow),
)  # fmt: skip


def tokens(count, generator, dtype=torch.float32, batch=1):
    def make(heads):
        x = torch.randn(batch, count, heads, 32, generator=generator)
        return x.transpose(1, 2).to(DEVICE, dtype)

    return make(1), make(1), make(2)


def make(spec, backend, dtype=torch.float32):
    return create_cache(
        spec, CacheGeometry(1, 1, 32, dtype=dtype), backend=backend, check="deferred"
    )


def runner(cache):
    return cache._layers[0]._held.runner


@pytest.mark.parametrize("spec", SPECS)
def test_steps_are_those_of_the_ordinary_way(spec, triton_backend):
    generator = torch.Generator().manual_seed(0)
    cache, plain = make(spec, "triton"), make(spec, "torch")
    taken = 0
    for count in (59, 1, 1, 1, *[2] * 19):  # until the widest window has let a tile go
        given = tokens(count, generator)
        expected = plain.attend(0, **by_name(*given))
        known = runner(cache)
        found = cache.attend(0, **by_name(*given))
        taken += known is not None and runner(cache) is known
        assert (found - expected).norm() <= 5e-4 * expected.norm()
    assert taken >= 15
    for side in "kv":
        assert torch.equal(cache.dequantize(0, side), plain.dequantize(0, side))
    cache.verify()


def test_a_step_reads_nothing_from_the_device_and_sends_nothing(triton_backend):
    generator = torch.Generator().manual_seed(1)
    cache = make("turboquant:bits=4", "triton", torch.bfloat16)
    for count in (70, 1, 1):
        cache.attend(0, **by_name(*tokens(count, generator, torch.bfloat16)))
    cache.reserve(20)
    for _ in range(3):
        cache.attend(0, **by_name(*tokens(1, generator, torch.bfloat16)))
    given = [tokens(1, generator, torch.bfloat16) for _ in range(2)]
    table = runner(cache)._known.rows.table
    address = table.data_ptr()
    with HostReads() as reads:
        for one in given:
            cache.attend(0, **by_name(*one))
    assert not reads.counts
    assert runner(cache)._known.rows.table.data_ptr() == address
    assert table[:, 0].tolist() == [77]


def test_a_step_asks_no_codec_for_its_form(triton_backend, monkeypatch):
    """As it was: twice a layer and step, which took the host longer than a launch."""
    generator, asked = torch.Generator().manual_seed(2), []
    cache = make("int:bits=8,window=2/turboquant:bits=4,window=2", "triton")
    for count in (20, 1, 1, 1):
        cache.attend(0, **by_name(*tokens(count, generator)))
    for stream in cache._layers[0].streams():
        kind = type(stream.codec)
        form = property(lambda self: asked.append(self) or self._form)
        monkeypatch.setattr(kind, "form", form)
    known = runner(cache)
    cache.attend(0, **by_name(*tokens(1, generator)))
    assert runner(cache) is known
    assert not asked


FAST = ["prepare_queries", "attend_general", "query_digits", "attend_digits"]


@pytest.mark.parametrize(("spec", "kernels", "others"), [
    ("turboquant:bits=4,window=8", ["take_tokens", *FAST, "merge_parts"], 0),
    ("int:bits=8,window=0", ["take_tokens", *FAST, "merge_parts"], 0),
    pytest.param(
        "kivi:bits=2,group=32,window=0",
        ["take_tokens", *FAST[:2], "merge_parts"],
        0,
        marks=pytest.mark.slow,
    ),
    # Tokens leave the window in other steps; queries for K are products that torch computes.
    pytest.param(
        "trellis:bits=4,window=2",
        ["take_tokens", *FAST, "merge_parts"],
        9,
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_the_launches_of_a_step(spec, kernels, others, triton_backend, monkeypatch):
    """The kernels, and how many operations of torch are beside them."""
    monkeypatch.setattr(fast, "LEAST_TOKENS", 1)
    generator = torch.Generator().manual_seed(5)
    cache = make(spec, "triton", torch.bfloat16)
    for count in ({"int:bits=8,window=0": 20, "trellis:bits=4,window=2": 600}.get(spec, 140), 1, 1):
        cache.attend(0, **by_name(*tokens(count, generator, torch.bfloat16)))
    cache.reserve(3)
    for _ in range(2):
        cache.attend(0, **by_name(*tokens(1, generator, torch.bfloat16)))
    given = tokens(1, generator, torch.bfloat16)
    with Launches() as launches:
        cache.attend(0, **by_name(*given))
    assert [name for name in launches.names if name in kernels] == kernels
    assert len(launches.names) - len(kernels) == others


@pytest.mark.parametrize("side", range(3))
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_what_can_not_be_stored_is_told_later(side, bad, triton_backend):
    generator = torch.Generator().manual_seed(2)
    cache = make("turboquant:bits=4", "triton")
    for count in (40, 1, 1, 1):
        cache.attend(0, **by_name(*tokens(count, generator)))
    fork = cache.fork()
    given = tokens(1, generator)
    given[side][0, 0, 0, 3] = bad
    cache.attend(0, **by_name(*given))
    cache.attend(0, **by_name(*tokens(1, generator)))
    with pytest.raises(NonFiniteError, match="deferred"):
        cache.verify()
    fork.verify()


def test_a_step_that_fails_leaves_what_was_held(triton_backend, monkeypatch):
    generator = torch.Generator().manual_seed(8)
    cache, plain = make("int:bits=8,window=2", "triton"), make("int:bits=8,window=2", "torch")
    for count in (40, 1, 1, 1):
        given = tokens(count, generator)
        for one in (cache, plain):
            one.attend(0, **by_name(*given))
    given = tokens(1, generator)

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        # The tokens have been taken then.
        patch.setattr(step, "attend_prepared", fails)
        cache.attend(0, **by_name(*tokens(1, generator)))
    assert cache.seq_len(0) == 43
    for _ in range(3):
        expected, found = plain.attend(0, **by_name(*given)), cache.attend(0, **by_name(*given))
        assert (found - expected).norm() <= 5e-4 * expected.norm()
        given = tokens(1, generator)
    for side in "kv":
        assert torch.equal(cache.dequantize(0, side), plain.dequantize(0, side))


def test_a_rollback_between_steps_is_seen(triton_backend):
    generator = torch.Generator().manual_seed(3)
    cache, plain = make("turboquant:bits=4", "triton"), make("turboquant:bits=4", "torch")
    for count in (50, 1, 1, 1):
        given = tokens(count, generator)
        for one in (cache, plain):
            one.attend(0, **by_name(*given))
    for one in (cache, plain):
        one.truncate(51)
    for _ in range(3):
        given = tokens(1, generator)
        expected, found = plain.attend(0, **by_name(*given)), cache.attend(0, **by_name(*given))
        assert (found - expected).norm() <= 5e-4 * expected.norm()
    assert torch.equal(cache.dequantize(0, "k"), plain.dequantize(0, "k"))


def paged(spec, backend, pages=8):
    geometry = CacheGeometry(1, 1, 32, dtype=torch.float32)
    options = {"num_pages": pages, "page_size": 64, "check": "deferred"}
    return create_cache(spec, geometry, "paged", backend=backend, **options)


def filled(spec, backend, lengths):
    """Return a view of sequences of such lengths on pages, and what they are stored in."""
    generator = torch.Generator().manual_seed(4)
    whole = paged(spec, backend)
    cache = whole.cache
    seqs = [cache.allocate() for _ in lengths]
    for seq, length in zip(seqs, lengths, strict=True):
        PagedView(cache, [seq]).attend(0, **by_name(*tokens(length, generator)))
    return PagedView(cache, seqs)


@pytest.mark.parametrize(("spec", "lengths", "wanted"), [
    # One row begins a page, and packs a tile.
    ("turboquant:bits=4,window=4", (61, 7), [1, 1, 1, 1, 1]),
    # One row packs a group with its sinks.
    ("kivi:bits=2,group=32/int:bits=8,window=0", (93, 30), [1, 1, 0, 1, 1]),
])  # fmt: skip
def test_rows_on_pages_step_together(spec, lengths, wanted, triton_backend):
    generator = torch.Generator().manual_seed(6)
    views, taken = [filled(spec, backend, lengths) for backend in ("triton", "torch")], []
    for turn in range(5):
        if turn == 4:
            views = [PagedView(view.cache, view.seqs[::-1]) for view in views]
        given = tokens(1, generator, batch=len(lengths))
        with HostReads() as reads, Launches() as launches:
            found = views[0].attend(0, **by_name(*given))
        expected = views[1].attend(0, **by_name(*given))
        for some, other in zip(found, expected, strict=True):
            assert (some - other).norm() <= 5e-4 * other.norm()
        taken.append(launches.counts["take_tokens"])
        assert not taken[-1] or not reads.counts.keys() - {"copy between devices"}
    assert taken == wanted
    for seqs in zip(*(view.seqs for view in views), strict=True):
        pair = [view.cache.layer_of(seq, 0) for view, seq in zip(views, seqs, strict=True)]
        for side in "kv":
            assert torch.equal(*(layer.dequantize(side) for layer in pair))
    views[0].verify()


def test_rows_have_flags_of_their_own(triton_backend):
    generator = torch.Generator().manual_seed(7)
    view = filled("int:bits=8,window=0", "triton", (20, 5))
    for _ in range(3):
        view.attend(0, **by_name(*tokens(1, generator, batch=2)))
    k, v, q = tokens(1, generator, batch=2)
    k[1, 0, 0, 3] = torch.nan
    view.attend(0, k=k, v=v, q=q)
    layers = [view.cache.layer_of(seq, 0) for seq in view.seqs]
    layers[0].verify()
    with pytest.raises(NonFiniteError, match="deferred"):
        layers[1].verify()
