"""What the connector loads, saves and counts, and what it does when a store fails."""

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.connector_engine import PAGE, Engine, request

from kvpact.errors import GeometryError, StoreFull, StoreUnavailable
from kvpact.stores import MemoryStore

CHUNK = 64
IDS = list(range(3 * CHUNK + 10))
PAGES = [7, 3, 11, 2, 9, 4, 30]
OTHERS = [1, 13, 5, 20, 8, 6, 31]


def saved(store, ids=IDS, **options):
    engine = Engine(store, **options)
    engine.serve(request("first", ids), PAGES)
    return engine


@pytest.fixture
def store():
    """One that holds the three chunks of `IDS`."""
    store = MemoryStore()
    saved(store)
    return store


def all_saved(engine):
    assert engine.worker._saves_lane.submit(lambda job: True).result(30)
    return engine.counts.total()["saved_chunks"]


def same(mine, right):
    return all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_another_engine_gets_the_bytes_of_the_pages():
    store = MemoryStore()
    first, second = saved(store), Engine(store, seed=1)
    assert second.load(request("second", IDS), OTHERS) == (3 * CHUNK, set())
    assert same(second.rows(OTHERS[:6]), first.rows(PAGES[:6]))
    assert second.told == OTHERS[:6]
    assert first.counts.total()["saved_chunks"] == 3
    count = second.counts.total()
    assert (count["loaded_tokens"], count["loaded_chunks"], count["misses"]) == (192, 3, 0)
    assert count["loaded_bytes"] == first.counts.total()["saved_bytes"] > 0


def test_pages_that_a_request_has_are_left_alone():
    store = MemoryStore()
    first, second = saved(store), Engine(store, seed=1)
    before = [x.clone() for x in second.rows(range(40))]
    # A page and a half of the second chunk are vLLM's own.
    assert second.load(request("second", IDS), OTHERS, 3 * PAGE) == (3 * PAGE, set())
    assert same(second.rows(OTHERS[3:6]), first.rows(PAGES[3:6]))
    rest = [i for i in range(40) if i not in OTHERS[3:6]]
    assert same(second.rows(rest), [x[rest] for x in before])


@pytest.mark.parametrize("tokens", [3 * CHUNK, 3 * CHUNK + 1])
def test_the_last_token_is_always_computed(tokens, store):
    held = (tokens - 1) // CHUNK * CHUNK
    assert Engine(store).matched(request("second", IDS[:tokens])) == held


def test_a_text_that_goes_on_saves_its_new_chunks_alone():
    store = MemoryStore()
    saved(store, ids=IDS[: CHUNK + 5])
    assert len(store) == 1
    engine = Engine(store)
    one = request("second", IDS)
    assert engine.load(one, PAGES) == (CHUNK, set())
    engine.step([(one, PAGES, CHUNK, len(IDS) - CHUNK)])
    assert all_saved(engine) == 2 and len(store) == 3


def test_pages_with_tokens_that_could_not_be_stored_are_not_saved():
    store = MemoryStore()
    engine = Engine(store)
    engine.damaged = {PAGES[1]}
    engine.serve(request("first", IDS), PAGES)
    assert engine.counts.total()["failures"] == 1 and len(store) == 0
    # Once they are whole, nothing is in the way of the same chunks.
    engine.damaged = set()
    engine.serve(request("second", IDS), PAGES)
    assert engine.counts.total()["failures"] == 1 and len(store) == 3


def test_chunks_are_saved_as_steps_complete_them_and_tokens_are_known():
    store = MemoryStore()
    engine, one = Engine(store), request("first", IDS[:100])
    assert engine.load(one, PAGES[:4]) == (0, set())
    engine.step([(one, PAGES[:2], 0, 50)])
    assert all_saved(engine) == 0
    engine.step([], [(one, PAGES[2:4], 50, 50)])
    assert all_saved(engine) == 1
    # 28 answered tokens complete the second chunk; the last one is not known in time.
    one.all_token_ids += IDS[100:127]
    engine.step([], [(one, [], 100, 28)])
    assert all_saved(engine) == 1
    one.all_token_ids += IDS[127:129]
    engine.step([], [(one, PAGES[4:5], 128, 1)])
    assert all_saved(engine) == 2
    second = Engine(store, seed=1)
    assert second.load(request("second", IDS), OTHERS) == (2 * CHUNK, set())
    assert same(second.rows(OTHERS[:4]), engine.rows(PAGES[:4]))


def test_a_request_that_comes_back_saves_from_its_new_pages():
    store = MemoryStore()
    engine, one = Engine(store), request("first", IDS)
    assert engine.load(one, PAGES) == (0, set())
    engine.step([(one, PAGES[:3], 0, CHUNK + 5)])
    assert all_saved(engine) == 1
    # Preempted: it loads what it saved, and computes the rest elsewhere.
    assert engine.load(one, OTHERS) == (CHUNK, set())
    assert same(engine.rows(OTHERS[:2]), engine.rows(PAGES[:2]))
    engine.step([], [(one, OTHERS, CHUNK, len(IDS) - CHUNK)], resumed=["first"])
    assert all_saved(engine) == 3
    second = Engine(store, seed=1)
    assert second.load(request("second", IDS), PAGES) == (3 * CHUNK, set())
    assert same(second.rows(PAGES[:6]), engine.rows(OTHERS[:6]))


def test_a_request_without_a_key_is_computed_and_counted():
    engine = Engine(MemoryStore())
    engine.scheduler._adapter = fails
    engine.serve(request("first", IDS), PAGES)
    assert engine.counts.total()["failures"] == 1
    assert engine.counts.total()["saved_chunks"] == 0


@pytest.mark.parametrize("other", [
    {"spec": "turboquant:bits=3,sinks=0"}, {"model": "another"}, {"tenant": "another"},
    {"rank": 1, "ranks": 2}, {"chunk": 32},
], ids=str)  # fmt: skip
def test_what_differs_has_other_keys(other, store):
    assert Engine(store, **other).matched(request("second", IDS)) == 0


def picture(name, offset):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset))


@pytest.mark.parametrize(("more", "held"), [
    ({"cache_salt": "pepper"}, 0),
    ({"lora_request": "adapter"}, 0),
    ({"mm_features": [picture("cat", 5)]}, 0),
    ({"mm_features": [picture("cat", CHUNK + 5)]}, CHUNK),
    ({"skip_reading_prefix_cache": True}, 0),
    ({"prompt_embeds": torch.zeros(1)}, 0),
], ids=["salt", "adapter", "image", "later image", "asked not to", "embeddings"])  # fmt: skip
def test_what_a_request_shows_beside_its_tokens_is_in_the_key(more, held, store):
    assert Engine(store).matched(request("second", IDS, **more)) == held


def test_all_ranks_have_to_hold_a_chunk():
    store = MemoryStore()
    saved(store, rank=0, ranks=2)
    assert Engine(store, ranks=2).matched(request("second", IDS)) == 0
    saved(store, rank=1, ranks=2)
    assert Engine(store, ranks=2).matched(request("second", IDS)) == 3 * CHUNK


@pytest.mark.parametrize("roles", [(True, False), (False, True)])
def test_an_engine_that_only_loads_or_only_saves(roles):
    store, loads = MemoryStore(), roles[0]
    saved(store, ids=IDS[: CHUNK + 5])
    engine, one = Engine(store, roles=roles), request("second", IDS)
    assert engine.load(one, PAGES) == (CHUNK if loads else 0, set())
    engine.step([(one, PAGES, 0, len(IDS))])
    all_saved(engine)
    assert len(store) == (1 if loads else 3)


def second_key(store, engine):
    one = request("asks", IDS)
    piece = engine.scheduler._pieces(engine.scheduler._of(one), 1, 2)[0]
    (name,) = [key for key in store if key.startswith(piece.key)]
    return name


def test_a_flipped_bit_is_computed_again_and_saved_anew():
    store = MemoryStore()
    first, engine = saved(store), Engine(store, seed=1)
    name = second_key(store, engine)
    whole = store.get(name)
    store.put(name, whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    one = request("second", IDS)
    assert engine.load(one, OTHERS) == (3 * CHUNK, set(OTHERS[2:6]))
    assert same(engine.rows(OTHERS[:2]), first.rows(PAGES[:2]))
    assert not store.contains(name)
    count = engine.counts.total()
    assert (count["damaged"], count["gone"], count["recomputed_tokens"]) == (1, 0, 2 * CHUNK)
    # vLLM asks again where nothing was loaded, and computes from the first page that failed.
    assert engine.matched(one) == 0
    for layer, right in zip(engine.memory.values(), first.memory.values(), strict=True):
        layer[OTHERS[:6]] = right[PAGES[:6]]
    engine.step([(one, OTHERS, CHUNK, len(IDS) - CHUNK)])
    all_saved(engine)
    assert store.get(name) == whole


def test_an_entry_that_its_store_finds_damaged_is_counted_as_such_by_name(store, caplog):
    engine = Engine(store, seed=1)
    name = second_key(store, engine)
    record, created = store._records[name]
    store._records[name] = record[:-9] + bytes([record[-9] ^ 4]) + record[-8:], created
    assert engine.load(request("second", IDS), OTHERS) == (3 * CHUNK, set(OTHERS[2:6]))
    count = engine.counts.total()
    assert (count["damaged"], count["gone"], count["failures"]) == (1, 0, 0)
    assert store.stats().damaged == 1 and not store.contains(name)
    (said,) = [x for x in caplog.messages if "can't be used" in x]
    assert name in said and "MemoryStore()" in said and "checksum" in said


def test_what_a_store_forgot_and_what_it_can_not_give_are_counted_apart(store, monkeypatch):
    engine, one = Engine(store, seed=1), request("second", IDS)
    assert engine.matched(one) == 3 * CHUNK
    store.delete(second_key(store, engine))
    engine.load(one, OTHERS)
    count = engine.counts.total()
    assert (count["gone"], count["damaged"], count["failures"]) == (1, 0, 0)

    def away(name, use=True):
        raise StoreUnavailable("nobody answers")

    engine = Engine(store, seed=1)
    monkeypatch.setattr(store, "_read", away)
    assert engine.load(request("third", IDS), OTHERS)[0] == CHUNK
    count = engine.counts.total()
    assert (count["gone"], count["damaged"], count["failures"]) == (0, 0, 1)


def test_times_and_the_queue_are_noted(store):
    first, second = saved(MemoryStore()), Engine(store, seed=1)
    assert second.load(request("second", IDS), OTHERS) == (3 * CHUNK, set())
    all_saved(first)
    noted, loaded = first.counts.take(), second.counts.take()
    assert len(noted["save_time_seconds"]) == 3 and min(noted["save_time_seconds"]) > 0
    assert noted["waiting_chunks"] == [3]
    assert len(loaded["load_time_seconds"]) == 1 and loaded["load_time_seconds"][0] > 0
    assert first.counts.take() == second.counts.take() == {}


class Frozen(MemoryStore):
    """Answers nothing from a moment on."""

    def __init__(self):
        super().__init__()
        self.thaw = threading.Event()
        self.thaw.set()

    def contains(self, key):
        self.thaw.wait()
        return super().contains(key)

    def fetch(self, key):
        self.thaw.wait()
        return super().fetch(key)


def test_a_lookup_that_gets_no_answer_ends_with_the_timeout():
    store = Frozen()
    saved(store)
    engine = Engine(store, timeout=0.05)
    store.thaw.clear()
    one = request("second", IDS)
    assert engine.scheduler.matched(one, 0) == (None, False) and engine.matched(one) == 0
    # Others don't wait for the same answer.
    while not engine.scheduler._lane.stuck(0.05):
        engine.step([])
    assert engine.scheduler.matched(request("third", IDS), 0) == (0, False)
    assert engine.counts.total()["timeouts"] == 2
    store.thaw.set()


def test_a_load_that_gets_no_answer_ends_with_the_timeout_and_writes_nothing_later():
    store = Frozen()
    saved(store)
    engine, one = Engine(store, seed=1, timeout=0.05), request("second", IDS)
    before = [x.clone() for x in engine.rows(range(40))]
    assert engine.matched(one) == 3 * CHUNK
    store.thaw.clear()
    assert engine.load(one, OTHERS) == (3 * CHUNK, set(OTHERS[:6]))
    store.thaw.set()
    assert engine.worker._loads_lane.submit(lambda job: True).result(30)
    assert engine.step([]) == (set(), set())
    assert same(engine.rows(range(40)), before)
    count = engine.counts.total()
    assert (count["timeouts"], count["loaded_tokens"], count["recomputed_tokens"]) == (1, 0, 192)
    assert engine.matched(one) == 0  # not again: a store may hold it and never give it
    assert engine.matched(request("third", IDS)) == 0


class Failing(MemoryStore):
    """Raises what no store should."""

    fails = False

    def _check(self):
        if self.fails:
            raise OSError("the disk is on fire")

    def put(self, key, blob):
        self._check()
        super().put(key, blob)

    def fetch(self, key):
        self._check()
        return super().fetch(key)


def test_a_store_that_raises_is_counted_and_nobody_else_is_told():
    store = Failing()
    saved(store)
    engine, one = Engine(store), request("second", IDS)
    store.fails = True
    assert engine.load(one, OTHERS) == (3 * CHUNK, set(OTHERS[:6]))
    engine.serve(request("third", IDS[::-1]), PAGES)
    assert engine.counts.total()["failures"] == 1 + 3


def test_a_full_store_and_a_full_queue_drop_what_comes():
    class Full(MemoryStore):
        def put(self, key, blob):
            raise StoreFull("no room")

    engine = saved(Full())
    assert engine.counts.total()["dropped"] == 3
    store = MemoryStore()
    engine = saved(store, queue_bytes=2 * 2 * CHUNK * 2 * 68)  # two chunks, of two layers
    assert engine.counts.total()["dropped"] == 1 and len(store) == 2


def fails(*_):
    raise MemoryError("no more of it")


def test_where_there_is_no_memory_for_copies_nothing_is_saved(monkeypatch):
    store = MemoryStore()
    engine = Engine(store)
    monkeypatch.setattr(engine.worker._pages["layers.1"], "copy", fails)
    engine.serve(request("first", IDS), PAGES)
    assert engine.counts.total()["dropped"] == 3
    assert not len(store) and not engine.worker.waiting


def test_a_load_that_can_not_be_written_is_computed(monkeypatch, store):
    engine = Engine(store)
    monkeypatch.setattr(engine.worker._pages["layers.1"], "paste", fails)
    assert engine.load(request("second", IDS), OTHERS) == (3 * CHUNK, set(OTHERS[:6]))
    count = engine.counts.total()
    assert (count["failures"], count["loaded_tokens"], count["loaded_chunks"]) == (1, 0, 0)
    assert engine.told == OTHERS[:6]


def test_requests_that_end_early_leave_nothing_behind(store):
    engine, one = Engine(store), request("second", IDS)
    engine.scheduler.allocated(one, OTHERS, engine.matched(one))
    engine.scheduler.finished(one)  # aborted; vLLM keeps the pages until the load has ended
    done = set()
    for _ in range(2000):
        done |= engine.step([])[0]
        if done:
            break
    assert done == {"second"}
    assert not engine.scheduler._tracked and not engine.scheduler._loading
    assert not engine.worker._running


def test_chunks_are_whole_pages():
    with pytest.raises(GeometryError, match="vLLM's have 32 tokens"):
        Engine(MemoryStore(), chunk=48)
