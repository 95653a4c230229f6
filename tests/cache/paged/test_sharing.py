"""Pages that several sequences hold: forks, published prefixes, rollbacks of either."""

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache
from kvpact.errors import GeometryError, StaleResult
from kvpact.testing import held_bytes, random_tokens, same_bytes

GEOMETRY = CacheGeometry(2, 2, 32, 48)
LOSSY = "int:bits=4,sinks=2,window=0"
IDS = list(range(300))


def kv(tokens, seed=0, start=0):
    """The same tokens of a seed stand at the same places, whatever pieces they come in."""
    k = random_tokens(2, 300, 32, seed=seed, offset=1.0)[:, start : start + tokens]
    return k, random_tokens(2, 300, 48, seed=seed + 500)[:, start : start + tokens]


def fill(cache, seq, tokens, seed=0):
    for layer in range(2):
        cache.append(layer, {seq: kv(tokens, seed, cache.seq_len(seq, layer))})


def filled(spec, tokens, pages=16, page_size=None):
    """Return a cache, and its only sequence."""
    cache = PagedKVCache(spec, GEOMETRY, pages, page_size)
    seq = cache.allocate()
    fill(cache, seq, tokens)
    return cache, seq


def shown(cache, seq, layer=1):
    entry = cache._sequence(seq).layers[layer]
    return entry.dequantize("k"), entry.dequantize("v")


def assert_shows(cache, seq, twin):
    for layer in range(2):
        for x, side in zip(shown(cache, seq, layer), ("k", "v"), strict=True):
            assert same_bytes(x, twin.dequantize(layer, side))


def twin_of(spec, *pieces):
    twin = create_cache(spec, GEOMETRY)
    for tokens, seed in pieces:
        for layer in range(2):
            twin.prefill(layer, *(x[None] for x in kv(tokens, seed, twin.seq_len(layer))))
    return twin


# --- forks


def test_a_fork_takes_pages_when_it_writes():
    cache, seq = filled("int:bits=4,window=0", 70)  # pages of 32: two full ones and one begun
    free = cache.num_free_pages
    fork = cache.fork(seq)
    assert cache.num_free_pages == free
    assert torch.equal(cache.block_table(seq), cache.block_table(fork))
    cache.append(0, {fork: kv(1, 3)})
    assert cache.num_free_pages == free - 1  # the last page, in all layers
    cache.append(1, {fork: kv(1, 3)})
    fill(cache, seq, 5, 4)  # it is alone on its last page now
    assert cache.num_free_pages == free - 1
    tables = cache.block_table([seq, fork])
    assert torch.equal(tables[0, :2], tables[1, :2])
    assert tables[0, 2] != tables[1, 2]
    cache.free(seq)
    assert cache.num_free_pages == free - 1 + 1
    cache.free(fork)
    assert cache.num_free_pages == 16


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    cache, seq = filled("int:bits=4,window=0", 64)
    fork = cache.fork(seq)
    free = cache.num_free_pages
    fill(cache, fork, 1)
    fill(cache, seq, 1)
    assert cache.num_free_pages == free - 2


def test_a_result_from_before_is_never_another_sequences():
    cache, seq = filled(LOSSY, 100, 8)
    k, v = (x[None] for x in kv(1, 1))
    result = cache.view([seq]).prefill(0, k, v)
    cache.free(seq)
    other = cache.allocate()
    fill(cache, other, 120, seed=5)
    with pytest.raises(StaleResult):
        _ = result.k


# --- prefixes


def test_what_matches():
    cache, seq = filled("int:bits=4", 100, 24)
    cache.publish(seq, IDS[:100])

    def matched(ids):
        other = cache.allocate(ids)
        found = cache.seq_len(other)
        assert cache.memory_usage() == held_bytes(cache)  # pages that are shared count once
        cache.free(other)
        return found

    assert matched(IDS[:97]) == 96
    assert matched(IDS[:96]) == 64  # the last token is left to be computed
    assert matched(IDS[:33]) == 32 and matched(IDS[:32]) == 0
    assert matched([]) == 0 and matched([*IDS[:40], -1, *IDS[41:100]]) == 32
    assert matched([-1, *IDS[1:100]]) == 0
    # The same page of tokens after another prefix is another page.
    assert matched([-1] * 32 + IDS[32:100]) == 0 and matched(IDS[32:100]) == 0
    with pytest.raises(GeometryError):
        cache.publish(seq, IDS[:101])


def test_a_cut_page_matches_no_more_unless_somebody_holds_it():
    cache, seq = filled("int:bits=4", 100)
    cache.publish(seq, IDS[:100])
    cache.truncate(seq, 70)  # the third page
    assert cache.seq_len(cache.allocate(IDS)) == 64
    # Two hold the first two now: a cut of one leaves them on offer.
    cache.truncate(seq, 40)
    again = cache.allocate(IDS)
    assert cache.seq_len(again) == 64
    assert_shows(cache, again, twin_of("int:bits=4,window=0", (64, 0)))


def test_a_cut_page_is_withdrawn_before_it_is_written():
    cache, seq = filled("int:bits=4,window=0", 64)
    cache.publish(seq, IDS[:64])
    fork = cache.fork(seq)
    cache.truncate(fork, 40)  # shared: stays on offer
    cache.free(seq)
    fill(cache, fork, 24, seed=9)  # other tokens on that page
    other = cache.allocate(IDS)
    assert cache.seq_len(other) == 32
    assert_shows(cache, other, twin_of("int:bits=4,window=0", (32, 0)))


def test_a_rollback_into_a_group_that_was_packed_in_advance_opens_it_again():
    """The window has all of its tokens: they are packed anew, as if nobody had published them."""
    spec = "kivi:bits=2,window=40"
    cache, seq = filled(spec, 100, 24, 32)
    assert cache.publish(seq, IDS[:100]) == 3
    twin = twin_of(spec, (100, 0))
    for rolled in (lambda n: cache.truncate(seq, n), twin.truncate):
        rolled(50)
    fill(cache, seq, 100, seed=8)
    for layer in range(2):
        twin.prefill(layer, *(x[None] for x in kv(100, 8, 50)))
    assert_shows(cache, seq, twin)


@pytest.mark.parametrize("between", ["append", "publish"])
def test_slots_cut_from_a_shared_page_are_cleared_once_it_is_one_sequences_alone(between):
    spec = "int:bits=4,sinks=2,window=32"  # a few new tokens wait, and write to no page
    cache, seq = filled(spec, 150, page_size=64)
    fork = cache.fork(seq)
    cache.truncate(fork, 72)
    if between == "publish":
        cache.publish(fork, IDS[:72])
    else:
        fill(cache, fork, 1, seed=9)
    cache.free(seq)
    pieces = [(72, 0), (1, 9)] if between == "append" else [(72, 0)]
    fill(cache, fork, 90, seed=9)
    assert_shows(cache, fork, twin_of(spec, *pieces, (90, 9)))


def test_padded_sequences_are_not_offered():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 16)
    view = cache.view()
    k, v = (x[None] for x in kv(70))
    for layer in range(2):
        view.prefill(layer, k, v, None, AttendConfig(padding=torch.tensor([3])))
    with pytest.raises(GeometryError):
        cache.publish(view.seqs[0], IDS[:70])


def test_a_prefix_published_twice_outlives_the_first_page():
    """Two sequences computed and published the same page: it is offered while either is held."""
    cache = PagedKVCache(LOSSY, GEOMETRY, 16)
    first, second = cache.allocate(), cache.allocate()
    for seq in (first, second):
        fill(cache, seq, 40)
        assert cache.publish(seq, IDS[:40]) == 1
    cache.free(first)
    third = cache.allocate(IDS[:40])
    assert cache.seq_len(third) == 32
    assert cache.block_table(third).tolist() == cache.block_table(second).tolist()[:1]
    cache.free(second)
    cache.free(third)
    assert cache.seq_len(cache.allocate(IDS[:40])) == 0 and cache.num_free_pages == 16
