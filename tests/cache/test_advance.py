"""Everybody counts a stream's tokens by one function, which packs what the specification packs."""

import random

import pytest
import torch
from tests.helpers.one_layer import kvq

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.cache.layer.quick import counted
from kvpact.cache.paged.sharing import seal
from kvpact.cache.stream.advance import MOST_STEP, SLACK, advance
from kvpact.testing import StreamOracle
from kvpact.testing.data import by_name
from kvpact.units import unit_of

SPECS = (
    "turboquant:bits=4",
    "turboquant:bits=3,window=5,sinks=3",
    "int:bits=8,window=0/fp8:window=40",
    "kivi:bits=2,window=16/kivi:bits=4,window=0",
    "kivi:bits=2,window=3/kvarn:bits=3,group=32",
    "trellis:bits=2,window=0/trellis:bits=4,window=70",
    "turboquant:bits=4,center=64,window=9/int:bits=4,window=0",
)
GEOMETRY = CacheGeometry(1, 2, 32, dtype=torch.float32)


def counts(stream):
    return stream.packed, stream.tail_start, stream.length, stream.spare


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("spec", SPECS)
def test_random_appends_are_counted_as_specified(spec, backend):
    """Counts of prompts, steps in both ways, rollbacks and room, of streams and the oracle."""
    parsed, chance = parse_spec(spec), random.Random(5)
    for _ in range(3):
        cache, codecs = create_cache(spec, GEOMETRY, backend=backend), parsed.codecs(32, 32, None)
        pairs = zip(codecs, (parsed.key, parsed.value), strict=True)
        oracles = [StreamOracle(codec, method.sinks, method.window) for codec, method in pairs]
        known = [(0, 0, 0, 0)] * 2
        for turn in range(40):
            new = chance.choice((1, 1, 2, 3, 7, MOST_STEP, MOST_STEP + 1, 40, 150))
            k, v, q = kvq(new, 32, seed=turn)
            waits = [0 if x.codec.ready else x.codec.learns_from for x in oracles]
            cache.attend(0, **by_name(k, v, q))
            for i, (stream, x) in enumerate(zip(cache.entry(0).streams(), (k, v), strict=True)):
                oracles[i].append(x, [0])
                unit = unit_of(stream.codec.group, stream.window)
                now = advance(*known[i], new, unit, stream.window, waits[i])
                assert counts(stream) == now[:4]
                assert (oracles[i].packed, oracles[i].length) == (now.packed, now.length)
            event = chance.random()
            if event < 0.1:
                cache.truncate(length := chance.randrange(cache.seq_len()))
                for oracle in oracles:
                    oracle.truncate(length)
            elif event < 0.2:
                cache.reserve(chance.choice((0, 20)))
            known = [counts(stream) for stream in cache.entry(0).streams()]


def test_a_tail_stays_in_room_that_was_asked_for_and_else_frees_what_it_packed():
    """Of 95 tokens, 31 in the tail, two more pack a group of 32: one new token is left."""
    assert advance(64, 64, 95, 4, 2, 32, 0) == (96, 96, 97, 2, False)
    assert advance(64, 64, 95, SLACK + 1, 2, 32, 0) == (96, 96, 97, SLACK - 1, True)
    assert advance(64, 64, 94, 4, 1, 32, 0) == (64, 64, 95, 3, True)
    assert advance(64, 64, 95, SLACK + 1, 1, 32, 0) == (96, 96, 96, 0, False)


def test_a_device_takes_no_step_in_which_sealed_tokens_leave_the_tail():
    """With 104 tokens a unit has left the window: the tail moves, though nothing is packed."""
    cache = create_cache("turboquant:bits=4,window=40", GEOMETRY)
    cache.attend(0, **by_name(*kvq(102, 32)))
    seal(cache.entry(0), 96)
    cache.reserve(20)
    assert [counts(x)[:3] for x in counted(cache.entry(0), 1).streams()] == [(96, 32, 103)] * 2
    assert counted(cache.entry(0), 2) is None
