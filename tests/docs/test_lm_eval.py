"""The class of the page on lm_eval: its likelihoods are of the compressed cache."""

import pytest
import torch
from doc_snippets import ROOT, blocks
from lm_eval_stub import HFLM, stand_in
from tiny_llama import tiny_llama

from kvpact import CompressedCache
from kvpact.integrations.transformers.versions import CACHE, named

COARSE = "int:bits=2,sinks=0,window=0"


@pytest.fixture
def page(monkeypatch):
    stand_in(monkeypatch)
    (block,) = (x for x in blocks(ROOT / "docs/guides/lm-eval.md") if x.language == "python")
    names = {}
    code = block.code.replace("cache=cache", f"{CACHE}=cache").replace('"cache"', f'"{CACHE}"')
    exec(code, names)
    return names["CompressedLM"]


@pytest.fixture
def inps():
    return torch.randint(3, 128, (2, 200), generator=torch.Generator().manual_seed(1))


def test_likelihoods_are_of_what_is_stored(page, inps):
    model = tiny_llama(512)
    exact, none = HFLM(model).loglikelihoods(inps), page(model, "none").loglikelihoods(inps)
    assert torch.allclose(exact, none, atol=1e-5)
    coarse = page(model, COARSE, batch_size=2).loglikelihoods(inps)
    cache = CompressedCache(model, COARSE)  # token by token, as decoding reads
    with torch.no_grad():
        steps = [model(inps[:, i : i + 1], **named(cache)).logits for i in range(inps.shape[1])]
    wanted = torch.cat(steps, 1).log_softmax(-1)[:, :-1].gather(2, inps[:, 1:, None])[..., 0]
    off = (coarse - exact).abs().mean()
    assert off > 0.01 and (coarse - wanted).abs().mean() < 0.7 * off


def test_texts_are_of_the_cache_that_decodes(page, inps):
    model = tiny_llama(512)
    call = {"max_length": 230, "stop": [], "do_sample": False, "eos_token_id": None}
    exact = HFLM(model)._model_generate(inps, **call)
    assert torch.equal(page(model, "none")._model_generate(inps, **call), exact)
    cache = CompressedCache(model, COARSE)
    rest = {"max_length": 230, "pad_token_id": 0, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(inps, **rest, **named(cache))
    assert torch.equal(page(model, COARSE)._model_generate(inps, **call), wanted)
    assert not torch.equal(wanted, exact)
