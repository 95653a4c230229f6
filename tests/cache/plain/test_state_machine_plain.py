"""A state machine: `KVCache` beside plain lists."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpact.cache import KVCache
from kvpact.errors import CacheFull, IncompleteToken

LAYERS, ROOM, WIDTH = 2, 7, 3
LAYER = st.integers(0, LAYERS - 1)


class Plain(RuleBasedStateMachine):
    """The model: per layer a list of committed tokens and a list of those in flight."""

    @initialize(dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    def begin(self, dtype):
        self.dtype, self.count = dtype, 0
        self.cache = cache = KVCache(LAYERS, ROOM, WIDTH, dtype)
        assert (cache.num_layers, cache.max_seq_len, cache.kv_dim) == (LAYERS, ROOM, WIDTH)
        self.done = [[] for _ in range(LAYERS)]
        self.flying = [[] for _ in range(LAYERS)]
        self.saved = []

    def tokens(self, count):
        """Tokens that no other has, exact in every dtype."""
        first, self.count = self.count, (self.count + count) % 40
        return [[float((first + i) % 40 * WIDTH + j) for j in range(WIDTH)] for i in range(count)]

    @rule(layer=LAYER, count=st.integers(1, 4), form=st.sampled_from(["torch", "numpy", "numpy16"]))
    def store(self, layer, count, form):
        given = self.tokens(count)
        k = torch.tensor(given if count > 1 else given[0])
        k = k.half() if form == "numpy16" else k
        pair = (k, -k) if form == "torch" else (k.numpy(), (-k).numpy())
        if len(self.done[layer]) + count > ROOM:
            try:
                self.cache.store_kv(layer, *pair)
            except CacheFull:
                return
            raise AssertionError("a full cache took tokens")
        self.cache.store_kv(layer, *pair)
        self.flying[layer] = given

    @rule(count=st.integers(1, 3))
    def advance(self, count):
        if min(map(len, self.flying)) < count:
            try:
                self.cache.advance(count)
            except IncompleteToken:
                return
            raise AssertionError("advanced without tokens")
        self.cache.advance(count)
        for layer in range(LAYERS):
            self.done[layer] += self.flying[layer][:count]
            self.flying[layer] = self.flying[layer][count:]

    @rule(length=st.integers(0, ROOM + 2))
    def truncate(self, length):
        self.cache.truncate(length)
        for layer in range(LAYERS):
            both = (self.done[layer] + self.flying[layer])[:length]
            self.done[layer] = self.done[layer][:length]
            self.flying[layer] = both[len(self.done[layer]) :]

    @rule()
    def clear(self):
        self.cache.clear()
        self.done = [[] for _ in range(LAYERS)]
        self.flying = [[] for _ in range(LAYERS)]

    @rule(payload=st.booleans())
    def save(self, payload):
        form = self.cache.to_payload() if payload else self.cache.snapshot()
        self.saved.append((form, [list(tokens) for tokens in self.done]))

    @rule(data=st.data())
    def restore(self, data):
        if self.saved:
            form, done = data.draw(st.sampled_from(self.saved))
            if isinstance(form, bytes):
                self.cache.restore_from_payload(form)
            else:
                self.cache.restore_from_snapshot(form)
            self.done = [list(tokens) for tokens in done]
            self.flying = [[] for _ in range(LAYERS)]

    @invariant()
    def shows_what_the_lists_hold(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.seq_len == len(self.done[0])
        for layer in range(LAYERS):
            wanted = self.done[layer] + self.flying[layer]
            assert self.cache.get_keys(layer).tolist() == wanted
            assert self.cache.get_keys(layer).dtype == self.cache.dtype == self.dtype
            assert (-self.cache.get_values(layer)).tolist() == wanted
            assert [(i, k.tolist()) for i, k in self.cache.for_each_key(layer)] == [
                *enumerate(wanted)
            ]
            assert [(-v).tolist() for _, v in self.cache.for_each_value(layer)] == wanted


Plain.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
TestPlain = Plain.TestCase
