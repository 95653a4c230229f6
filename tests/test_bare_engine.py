"""The example of a bare engine: short, greedy, and what it would compute without a cache."""

from pathlib import Path

import pytest
import torch
from by_path import module_at

EXAMPLE = Path(__file__).parents[1] / "examples" / "bare_engine.py"


@pytest.fixture(scope="module")
def engine():
    return module_at(EXAMPLE)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 256, (2, 150), generator=torch.Generator().manual_seed(0))


def test_it_is_short():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 80


@torch.no_grad()
def test_an_exact_cache_gives_the_tokens_of_no_cache(engine, prompt):
    """Every step from the whole text on a new cache: nothing is read back."""
    model = engine.Decoder()
    found, cache = engine.generate(model, prompt, 8, "none")
    ids = prompt
    for step in range(8):
        nothing = engine.create_cache("none", cache.geometry)
        wanted = model.forward(ids, nothing).argmax(-1, keepdim=True)
        assert torch.equal(wanted, found[:, step : step + 1])
        ids = torch.cat([ids, wanted], 1)
    assert len(found.unique()) > 8, "tokens that repeat show nothing"
    assert cache.seq_len(0) == cache.seq_len(engine.LAYERS - 1) == 150 + 7


@torch.no_grad()
def test_a_compressed_cache_stays_close_and_is_smaller(engine, prompt):
    model = engine.Decoder()
    logits, bytes_held = {}, {}
    for spec in ("none", "int:bits=8", "turboquant:bits=3"):
        cache = engine.generate(model, prompt, 1, spec)[1]
        # The same next token for all: the step that reads the past.
        logits[spec] = model.forward(torch.tensor([[1], [2]]), cache)
        bytes_held[spec] = cache.memory_usage()
    spread = logits["none"].std()
    close, far = ((logits[s] - logits["none"]).std() for s in ("int:bits=8", "turboquant:bits=3"))
    assert 0 < close < 0.02 * spread and close < far < 0.4 * spread
    assert bytes_held["turboquant:bits=3"] < bytes_held["int:bits=8"] < bytes_held["none"]
