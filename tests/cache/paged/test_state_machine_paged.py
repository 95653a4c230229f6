"""Random histories of a small pool against a plain dictionary of tensors; calls fail at any line.

A token's K and V follow from its layer, its place and all ids up to it: what shared pages hold is
known. Lossy methods are compared with a contiguous cache per sequence.
"""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_model import GEOMETRY, LAYERS, LONGEST, PROMPTS, Model, calibration, kv
from random_cases import run_histories
from tests.helpers.faults import FAULTS, disturbed, is_free, same_state

from kvpact import PagedKVCache
from kvpact.cache.layer.states import layer_state
from kvpact.errors import CacheFull, SequenceError
from kvpact.testing import same_bytes

LEAST_CALLS = 25
"""In each example, on average."""
LEARNING = "vq:codebook_size=16,dims=4,sinks=2,window=0/lowrank:rank=4,sinks=0,window=0"
# Spec: pages, a page's slots, and whether sequences share published prefixes. A shared prefix has
# slots alone and a contiguous cache a window, too, so lossy methods with a window do without.
SPECS = {
    "none": (14, None, True),
    "turboquant:bits=3,center=64,sinks=3,window=0": (9, None, True),
    "kivi:bits=2,sinks=2,window=40/int:bits=4,sinks=5,window=0": (8, 64, False),
    LEARNING: (14, None, True),
}


def _same(states, others):
    return all(map(same_state, states, others))


class Pages(RuleBasedStateMachine):
    spec, num_pages, page_size, shares = "none", 14, None, True

    def __init__(self):
        super().__init__()
        more = {"page_size": self.page_size, "calibration": calibration(self.spec)}
        self.cache = PagedKVCache(self.spec, GEOMETRY, self.num_pages, **more)
        self.size, self.empty_bytes = self.cache.pool.page_size, self.cache.memory_usage()
        self.models, self.freed = {}, []

    def _pick(self, which):
        return sorted(self.models)[which % len(self.models)]

    def _references(self):
        counts = [0] * self.num_pages
        for seq in self.models:
            for page in self.cache.block_table(seq).tolist():
                counts[page] += 1
        return counts

    @initialize(counts=st.lists(st.integers(30, 90), min_size=2, max_size=2))
    def begin(self, counts):
        self.allocate(0)
        self.allocate(2)
        self.append([0, 1], counts, True, True)

    @precondition(lambda self: len(self.models) < 6)
    @rule(prompt=st.integers(0, 2))
    def allocate(self, prompt):
        seq, model = self.cache.allocate(), Model(self.spec)
        model.prompt = prompt
        assert seq not in self.models and seq not in self.freed
        self.models[seq] = model

    @precondition(lambda self: self.models)
    @rule(
        which=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        counts=st.lists(
            st.one_of(st.sampled_from([1, 31, 32, 33, 64]), st.integers(1, 90)),
            min_size=3,
            max_size=3,
        ),
        all_layers=st.sampled_from([True, True, True, False]),
        offer=st.booleans(),
    )
    def append(self, which, counts, all_layers, offer):
        seqs = list(dict.fromkeys(self._pick(i) for i in which))
        together = all(len(set(self.models[seq].lengths())) == 1 for seq in seqs)
        before = self._state()
        for layer in range(LAYERS if all_layers else 1):
            tokens = {}
            for seq, count in zip(seqs, counts, strict=False):
                model = self.models[seq]
                start = model.lengths()[layer]
                end = min(start + count, LONGEST)
                if end > len(model.ids):
                    model.ids += PROMPTS[model.prompt][len(model.ids) : end]
                if end > start:
                    tokens[seq] = kv(layer, model.ids[:end], start)
            try:
                self.cache.append(layer, tokens)
            except CacheFull:
                # The first layer took the pages of all.
                assert layer == 0 or not together
                assert layer > 0 or self._state() == before
                break
            for seq, pair in tokens.items():
                self.models[seq].append(layer, *pair)
        for seq in seqs:
            model = self.models[seq]
            model.ids = model.ids[: max(model.lengths())]
            if offer and self.shares:
                self._publish(seq)

    def _state(self):
        tables = [self.cache.block_table(seq).tolist() for seq in sorted(self.models)]
        return self.cache.num_free_pages, tables

    @precondition(lambda self: self.models and len(self.models) < 6)
    @rule(which=st.integers(0, 5), prompt=st.integers(0, 2))
    def fork(self, which, prompt):
        seq = self._pick(which)
        free = self.cache.num_free_pages
        other = self.cache.fork(seq)
        assert self.cache.num_free_pages == free
        self.models[other] = self.models[seq].fork()
        self.models[other].prompt = prompt

    @precondition(lambda self: self.models)
    @rule(
        which=st.integers(0, 5),
        share=st.one_of(st.floats(0, 1.1), st.sampled_from([0.5, 0.9, 0.99])),
        even=st.booleans(),
    )
    def truncate(self, which, share, even):
        seq = self._pick(which)
        model = self.models[seq]
        kept = round(share * max(model.lengths()))
        kept = kept // self.size * self.size if even else kept
        if kept < max(model.lengths()) and kept % self.size:
            model.whole_groups = False
        model.published = min(model.published, kept // self.size)
        self.cache.truncate(seq, kept)
        model.truncate(kept)

    @precondition(lambda self: self.models)
    @rule(which=st.integers(0, 5))
    def free(self, which):
        seq = self._pick(which)
        self.cache.free(seq)
        del self.models[seq]
        self.freed.append(seq)

    @precondition(lambda self: self.models)
    @rule(
        call=st.sampled_from(["append", "append", "truncate", "fork", "free", "publish"]),
        which=st.lists(st.integers(0, 5), min_size=1, max_size=2),
        fault=st.sampled_from(sorted(FAULTS)),
        n=st.one_of(st.integers(1, 80), st.integers(1, 600)),
        count=st.sampled_from([1, 33, 70]),
    )
    def disturb(self, call, which, fault, n, count):
        """Let a call fail at its n-th line or operation, then find out which state that left."""
        seqs = list(dict.fromkeys(self._pick(i) for i in which))
        seq, tokens = seqs[0], {}
        if call == "append":
            for each in seqs:
                model = self.models[each]
                start, ids = model.lengths()[0], model.ids
                end = min(start + count, LONGEST)
                if end > start:
                    ids = ids + PROMPTS[model.prompt][len(ids) : end]
                    tokens[each] = (ids, kv(0, ids[:end], start))
        if call == "publish" and not (self.shares and self.models[seq].whole_groups):
            return
        kept = max(max(self.models[seq].lengths()) - count, 0)
        calls = {
            "append": lambda: self.cache.append(0, {s: pair for s, (_, pair) in tokens.items()}),
            "truncate": lambda: self.cache.truncate(seq, kept),
            "fork": lambda: self.cache.fork(seq),
            "free": lambda: self.cache.free(seq),
            "publish": lambda: self.cache.publish(seq, self.models[seq].ids),
        }
        before = {s: self._layer_states(s) for s in self.models}
        try:
            disturbed(calls[call], fault, n)
        except CacheFull:
            assert call == "append"
        locks = [*self.cache.layer_locks, self.cache.pool.lock]
        assert all(is_free(lock) for lock in locks)
        found = {s: self._layer_states(s) for s in self.models if s in self.cache._sequences}
        changed = {s for s in before if s not in found or not _same(found[s], before[s])}
        if call == "append":
            assert changed in (set(), set(tokens))  # all sequences or none
            for each in changed:
                self.models[each].ids = tokens[each][0]
                self.models[each].append(0, *tokens[each][1])
        elif changed:
            assert changed == {seq}
            assert call in ("truncate", "free")
            if call == "free":
                del self.models[seq]
                self.freed.append(seq)
            else:
                self.models[seq].truncate(kept)
        if call == "truncate":
            # What is offered is dropped first: it may be gone although nothing else changed.
            self.models[seq].published = 0
            if seq in changed and kept % self.size:
                self.models[seq].whole_groups = False
        for extra in set(self.cache._sequences) - set(self.models):
            assert call == "fork"
            self.cache.free(extra)

    def _layer_states(self, seq):
        return [layer_state(self.cache.layer_of(seq, layer)) for layer in range(LAYERS)]

    @precondition(lambda self: self.freed)
    @rule(which=st.integers(0, 5))
    def free_again(self, which):
        seq = self.freed[which % len(self.freed)]
        with pytest.raises(SequenceError):
            self.cache.free(seq)

    @precondition(lambda self: self.models and self.shares)
    @rule(which=st.integers(0, 5))
    def publish(self, which):
        self._publish(self._pick(which))

    def _publish(self, seq):
        model = self.models[seq]
        # A group that a rollback cut has other bytes than one that came whole.
        if self.spec == "none" or model.whole_groups:
            model.published = self.cache.publish(seq, model.ids)
            assert model.published == min(model.lengths()) // self.size

    @precondition(lambda self: self.shares and len(self.models) < 6)
    @rule(which=st.integers(0, 5), prompt=st.integers(0, 2), count=st.integers(1, LONGEST))
    def allocate_with_prefix(self, which, prompt, count):
        ids = PROMPTS[prompt][:count]
        if self.models and which % 2:
            ids = self.models[self._pick(which)].ids or ids
        free = self.cache.num_free_pages
        seq = self.cache.allocate(ids)
        matched = self.cache.seq_len(seq)
        assert self.cache.num_free_pages == free
        assert matched % self.size == 0 and matched < len(ids)
        for other in self.models.values():
            known = other.published * self.size
            if other.ids[:known] == ids[:known] and known < len(ids):
                assert matched >= known
        model = Model(self.spec)
        model.prompt, model.ids = prompt, ids[:matched]
        self.models[seq] = model
        counts = self._references()
        assert all(counts[page] > 1 for page in self.cache.block_table(seq).tolist())
        if matched:
            for layer in range(LAYERS):
                assert self.cache.seq_len(seq, layer) == matched
                model.append(layer, *kv(layer, model.ids, 0))

    @invariant()
    def no_page_is_lost_or_held_twice(self):
        counts, pool = self._references(), self.cache.pool
        assert self.cache.num_free_pages == counts.count(0)  # counts anew what was interrupted
        assert pool.references == counts
        assert sorted(pool._free) == [page for page, count in enumerate(counts) if not count]

    @invariant()
    def contents_are_the_dictionary(self):
        for seq, model in self.models.items():
            for layer, length in enumerate(model.lengths()):
                assert self.cache.seq_len(seq, layer) == length
                if not length:
                    continue
                entry = self.cache._sequence(seq).layers[layer]
                for side, plain in (("k", model.k[layer]), ("v", model.v[layer])):
                    shown = entry.dequantize(side)
                    assert same_bytes(shown, model.twin.dequantize(layer, side))
                    if self.spec == "none":
                        assert same_bytes(shown[0], plain)

    @invariant()
    def nothing_is_left_on_a_sequences_own_pages(self):
        # Writing is an OR: what stood there before would come through.
        for seq in self.models:
            for index, page in enumerate(self.cache.block_table(seq).tolist()):
                layers = self.cache._sequence(seq).layers
                if self.cache.pool.references[page] > 1 or not all(x.clean for x in layers):
                    continue
                for layer in layers:
                    for stream in layer.streams():
                        inside = min(max(stream.packed - index * self.size, 0), self.size)
                        for field in stream.codec.fields:
                            units = stream.store.source().segment(index)[field.name]
                            clean = units.clone()
                            field.clear_from(clean, inside)
                            assert same_bytes(clean, units)

    def teardown(self):
        for seq in list(self.models):
            self.cache.free(seq)
        assert self.cache.num_free_pages == self.num_pages
        assert not any(self.cache.pool.references)
        assert not self.cache._prefixes._pages
        assert self.cache.memory_usage() == self.empty_bytes


OPERATIONS = ("allocate", "append", "fork", "truncate", "free", "publish")


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", SPECS)
def test_histories(spec, share, monkeypatch):
    pages, page_size, shares = SPECS[spec]
    called = []
    for name in OPERATIONS:
        operation = getattr(PagedKVCache, name)

        def counted(*args, operation=operation, name=name, **options):
            called.append(name)
            return operation(*args, **options)

        monkeypatch.setattr(PagedKVCache, name, counted)
    members = {"spec": spec, "num_pages": pages, "page_size": page_size, "shares": shares}
    examples = {"none": 80, LEARNING: 20}.get(spec, 40) // share
    run_histories(Pages, 30, examples, **members)
    # Many operations, not only histories that were allowed to be long.
    assert set(called) >= set(OPERATIONS[: 6 if shares else 5])
    assert len(called) >= LEAST_CALLS * examples
