"""A real model's decode steps, replayed, against the torch backend."""

import pytest
import torch

pytest.importorskip("triton")

from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.graphs import DecodeGraph
from kvpact.integrations.transformers.versions import named
from kvpact.kernels.triton.digits import fast

CUDA = torch.cuda.is_available()
LAYERS = 30 if CUDA else 3
"""Interpreted, a step of a layer takes seconds."""
TEXT = "Catherine Morland was born to be an heroine, and her mother"
STEPS = 3


@pytest.fixture(scope="module")
def smollm2():
    """The model's first layers, and the ids of a text."""
    model, tokenizer = load_model("smollm2")
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model = model.to("cuda", torch.bfloat16) if CUDA else model
    return model, tokenizer(TEXT, return_tensors="pt").input_ids.to(model.device)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spec", ["turboquant:bits=4,window=4", "int:bits=8,window=4"])
def test_steps_of_a_real_model(spec, smollm2, triton_backend, monkeypatch):
    monkeypatch.setattr(fast, "LEAST_TOKENS", 1)
    model, ids = smollm2
    prompt, rest = ids[:, :-STEPS], ids[:, -STEPS:]
    logits, caches = [], []
    for backend in ("torch", "triton"):
        cache = CompressedCache(model, spec, backend=backend, check="deferred")
        with torch.no_grad():
            model(prompt, **named(cache))
        caches.append(cache)
    steps = DecodeGraph(model, caches[1], room=STEPS)
    for token in rest.split(1, 1):
        with torch.no_grad():
            expected = model(token, **named(caches[0])).logits.float()
        found = steps(token).float()
        logits.append((found - expected).norm() / expected.norm())
        assert found.argmax() == expected.argmax()
    assert steps.replays == STEPS
    assert max(logits) <= (2e-2 if CUDA else 1e-3)
    caches[1].verify()
