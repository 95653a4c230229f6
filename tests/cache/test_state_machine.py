"""Random histories of a small cache against an oracle; a call that fails changes all or nothing."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_cases import run_histories
from tests.helpers.faults import FAULTS, disturbed, is_free, length_of, same_state

import kvpact
from kvpact.cache.layer.states import layer_state
from kvpact.errors import GeometryError, SpecError
from kvpact.testing import held_bytes, random_offset, random_tokens, reference_attention, same_bytes
from kvpact.testing.oracle import LayerOracle

HEADS, DIM, V_DIM = 2, 16, 8
STEPS = 20
SPECS = {
    "none": torch.bfloat16, "fp8": torch.float16, "int:bits=3,sinks=0,window=0": torch.float32,
    "turboquant:bits=4": torch.float32,
    "turboquant:bits=3,mode=prod,sinks=2,window=9": torch.float32,
    "turboquant:bits=3,center=64": torch.float32, "kivi:bits=2,sinks=3,window=40": torch.float16,
    "kvarn:bits=4,group=32,sinks=0,window=0/int:bits=8,sinks=5,window=70": torch.float32,
    "trellis:bits=2,weights=false,blocks=false": torch.float32,
    "vq:codebook_size=16,dims=4,sinks=2,window=20": torch.float32,
    "lowrank:rank=4,window=0/hybrid:rank=4,group=4,sinks=3,window=9": torch.float32,
}  # fmt: skip
OFFSETS = (
    ("turboquant:bits=4,sinks=2,window=9", torch.float32),
    pytest.param("kivi:bits=2,sinks=3,window=40", torch.float16, marks=pytest.mark.slow),
)
examples = pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.slow)])


class Histories(RuleBasedStateMachine):
    """Up to three forks, one of them active."""

    spec = "none"
    dtype = torch.float32
    offset = None
    most = 500

    def __init__(self):
        super().__init__()
        spec = kvpact.parse_spec(self.spec)
        self.geometry = kvpact.CacheGeometry(1, HEADS, DIM, V_DIM, self.dtype)
        oracle = LayerOracle(spec, DIM, V_DIM, self.dtype, self.offset)
        self.pairs = [(self._new_cache(), oracle)]
        self.active, self.seed = 0, 0

    def _new_cache(self):
        offsets = None if self.offset is None else {0: self.offset}
        return kvpact.create_cache(self.spec, self.geometry, key_offsets=offsets)

    @property
    def cache(self):
        return self.pairs[self.active][0]

    @property
    def oracle(self):
        return self.pairs[self.active][1]

    def _tokens(self, batch, count):
        self.seed += 1
        k = random_tokens(batch, HEADS, count, DIM, seed=self.seed, dtype=self.dtype, offset=1.0)
        v = random_tokens(batch, HEADS, count, V_DIM, seed=self.seed + 10**6, dtype=self.dtype)
        q = random_tokens(batch, 2 * HEADS, count, DIM, seed=self.seed + 10**7, dtype=self.dtype)
        return k, v, q

    def _make_room(self, count):
        """Do what a call with so many tokens does first, and leaves done where it fails."""

    @initialize(
        count=st.one_of(st.integers(60, 200), st.integers(1, 5)),
        how=st.sampled_from(["attend", "prefill"]),
        rows=st.lists(st.integers(0, 6), min_size=1, max_size=3),
        padded=st.booleans(),
    )
    def begin(self, count, how, rows, padded):
        # Histories that begin with a few tokens seldom come to a full group.
        self.append(count, how, rows, padded)

    @rule(
        count=st.one_of(st.sampled_from([1, 31, 32, 63, 64, 65]), st.integers(1, 70)),
        how=st.sampled_from(["attend", "prefill", "decode"]),
        rows=st.lists(st.integers(0, 6), min_size=1, max_size=3),
        padded=st.booleans(),
    )
    def append(self, count, how, rows, padded):
        if self.oracle.length > self.most:
            return
        # What a row begins with is said with its first tokens.
        padding = rows if padded and self.oracle.length == 0 else None
        batch = self.oracle.batch or len(rows)
        if padding is not None:
            padding = (padding * batch)[:batch]
        count = 1 if how == "decode" else count
        self._make_room(count)
        k, v, q = self._tokens(batch, count)
        config = kvpact.AttendConfig(padding=torch.tensor(padding) if padding else None)
        past = self.oracle.read() if self.oracle.length else (k[:, :, :0], v[:, :, :0])
        self.oracle.append(k, v, padding)
        expected = [torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True)]
        if how == "prefill":
            result = self.cache.prefill(0, k, v, config=config)
            assert same_bytes(result.k, expected[0]) and same_bytes(result.v, expected[1])
            return
        if how == "decode":
            output = self.cache.decode(0, k, v, q, config).output
        else:
            output = self.cache.attend(0, k=k, v=v, q=q, config=config)
        config = kvpact.AttendConfig(padding=torch.tensor(self.oracle.padding))
        wanted = reference_attention(q, *expected, config)
        tolerance = {torch.float16: 5e-3, torch.bfloat16: 3e-2}.get(self.dtype)
        if self.dtype is torch.float32:  # what a backend promises where levels are whole numbers
            assert (output.double() - wanted).norm() <= 5e-4 * wanted.norm()
            return
        torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=tolerance)

    @precondition(lambda self: self.oracle.length)
    @rule(count=st.integers(20, 70), how=st.sampled_from(["attend", "prefill"]))
    def append_more(self, count, how):
        # Histories without many tokens never see a window move on.
        self.append(count, how, [0], False)

    @precondition(lambda self: self.oracle.length)
    @rule(
        where=st.one_of(
            st.floats(0.3, 1).map(lambda x: ("share", x)),
            st.integers(-3, 70).map(lambda x: ("last", x)),
        )
    )
    def truncate(self, where):
        kind, amount = where
        length = self.oracle.length
        kept = round(amount * length) if kind == "share" else max(length - amount, 0)
        self.cache.truncate(kept)
        self.oracle.truncate(kept)

    @precondition(lambda self: self.oracle.length)
    @rule(begin=st.floats(0, 1), share=st.floats(0, 1), heads=st.booleans())
    def let_go(self, begin, share, heads):
        """Forget a range; or each head forgets as many of other places."""
        length = self.oracle.length
        begin = round(begin * length)
        end = begin + round(share * (length - begin))
        kept = [t for t in range(length) if not begin <= t < end]
        kept = torch.tensor(kept, dtype=torch.int64).expand(self.oracle.batch, HEADS, len(kept))
        if heads and end < length and begin:
            kept = kept.clone()
            kept[:, 1, begin - 1] = end - 1 if end > begin else begin - 1

        def call():
            if heads:
                self.cache.compact(kept[None])
            else:
                self.cache.evict(begin, end)

        if self.offset is not None or any(self.oracle.padding):
            with pytest.raises((GeometryError, SpecError), match=r"padded|positions"):
                call()
            return
        call()
        self.oracle.keep(kept)

    @precondition(lambda self: len(self.pairs) < 3)
    @rule(switch=st.booleans())
    def fork(self, switch):
        self.pairs.append((self.cache.fork(), self.oracle.fork()))
        if switch:
            self.active = len(self.pairs) - 1

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(to=st.integers(0, 2), forget=st.booleans())
    def switch(self, to, forget):
        if forget:
            del self.pairs[self.active]
        self.active = to % len(self.pairs)

    @precondition(lambda self: self.oracle.batch)
    @rule(picks=st.lists(st.integers(0, 5), min_size=1, max_size=4), same=st.booleans())
    def select(self, picks, same):
        batch = self.oracle.batch
        picks = (picks * batch)[:batch] if same else picks
        indices = [pick % batch for pick in picks]
        (self.cache.reorder if same else self.cache.select)(torch.tensor(indices))
        self.oracle.select(indices)

    @precondition(lambda self: self.oracle.batch and self.oracle.batch < 3)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        self.cache.repeat(times)
        self.oracle.select([i for i in range(self.oracle.batch) for _ in range(times)])

    @rule(
        call=st.sampled_from(
            ["attend", "attend", "store", "truncate", "fork", "select", "reset", "evict"]
        ),
        fault=st.sampled_from(sorted(FAULTS)),
        where=st.one_of(st.floats(0, 1), st.floats(0.8, 1), st.floats(0.95, 1)),
        count=st.sampled_from([1, 1, 33, 70]),
    )
    def disturb(self, call, fault, where, count):
        """Let a call fail at one of its lines or operations, then find out which state it left."""
        batch, length = self.oracle.batch or 2, self.oracle.length
        if call == "evict" and (not length or self.offset is not None or any(self.oracle.padding)):
            return
        if length > self.most or (call == "select" and not length):
            return
        if call in ("attend", "store"):
            self._make_room(count)
        k, v, q = self._tokens(batch, count)
        kept, rows = max(length - count, 0), [batch - 1, 0][:batch]
        calls = {
            "attend": lambda cache: cache.attend(0, k=k, v=v, q=q),
            "store": lambda cache: cache.store(0, k=k, v=v),
            "truncate": lambda cache: cache.truncate(kept),
            "fork": lambda cache: cache.fork(),
            "select": lambda cache: cache.select(torch.tensor(rows)),
            "reset": lambda cache: cache.reset(),
            "evict": lambda cache: cache.evict(kept // 2, kept),
        }
        after = self.oracle.fork()
        if call in ("attend", "store"):
            after.append(k, v)
        elif call == "truncate":
            after.truncate(kept)
        elif call == "select":
            after.select(rows)
        elif call == "reset":
            after.reset()
        elif call == "evict":
            stay = torch.tensor([t for t in range(length) if not kept // 2 <= t < kept])
            after.keep(stay.expand(batch, HEADS, len(stay)))
        before = layer_state(self.cache.entry(0))
        for _ in range(2):  # what a first call looks up once for all has lines of its own
            twin = self._new_cache()
            twin.restore(self.cache.snapshot())
            most = length_of(partial(calls[call], twin), fault)
        disturbed(lambda: calls[call](self.cache), fault, 1 + round(where * most))
        found = layer_state(self.cache.entry(0))
        assert is_free(self.cache.entry(0).lock)
        if not same_state(found, before):
            assert same_state(found, layer_state(twin.entry(0)))
            self.pairs[self.active] = (self.cache, after)

    @precondition(lambda self: self.oracle.length > 300)
    @rule()
    def reset(self):
        self.cache.reset()
        self.oracle.reset()

    @invariant()
    def all_forks_hold_what_they_should(self):
        for cache, oracle in self.pairs:
            assert cache.seq_len() == oracle.length
            counted = cache.memory_usage()
            assert counted == held_bytes(cache) == cache.stats()["bytes"]["total"]
            if oracle.length:
                for side, wanted in zip("kv", oracle.read(), strict=True):
                    assert same_bytes(cache.dequantize(0, side), wanted)
                    if self.spec == "none":
                        assert same_bytes(wanted, getattr(oracle, side).given)


@examples
@pytest.mark.parametrize(("spec", "dtype"), SPECS.items())
def test_histories(spec, dtype, examples):
    run(spec, dtype, examples)


@pytest.mark.parametrize(("spec", "dtype"), OFFSETS)
def test_histories_of_keys_with_an_offset(spec, dtype):
    run(spec, dtype, 5, random_offset(HEADS, DIM, seed=1))


def run(spec, dtype, examples, offset=None):
    run_histories(Histories, STEPS, examples, spec=spec, dtype=dtype, offset=offset)
