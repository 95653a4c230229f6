"""Tiny random models, made from configs: no hub, no downloads."""

import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_configs import KINDS, SIZES, run
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.model import fallback
from kvpact.integrations.transformers.model.facts import layer_facts
from kvpact.integrations.transformers.versions import VersionError

logging.set_verbosity_error()


def _or_skipped():
    """Run a phase of a test; skip it where kvpact refuses what a later transformers has."""
    try:
        return (yield)
    except VersionError as lacks:
        if Version(transformers.__version__) >= Version(lacks.version):
            raise
        pytest.skip(str(lacks))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from _or_skipped())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from _or_skipped())


@pytest.fixture
def make_model():
    """Return a function that makes a random model of a config."""

    def make(config, attention="sdpa", seed=0):
        torch.manual_seed(seed)
        layer_facts(config.get_text_config(decoder=True))  # may refuse this version
        if config.model_type == "deepseek_v4":  # transformers lets it attend by eager alone
            attention = "eager"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        # Random weights this large give logits that differ clearly, so that equal greedy tokens
        # of exact caches mean something.
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        return model.eval()

    return make


@pytest.fixture
def filled(make_model, sizes, ids):
    """Return a function that makes a model of `KINDS`, and a cache of the first of `ids`."""

    def make(name, tokens, spec="none"):
        model = make_model(KINDS[name](sizes))
        cache = CompressedCache(model, spec)
        run(model, cache, [ids[:, :tokens]])
        return model, cache

    return make


@pytest.fixture
def sizes():
    """Return the sizes that every tiny config starts from."""
    return dict(SIZES)


@pytest.fixture
def llama(make_model):
    """Return a two-layer Llama with grouped-query attention."""
    return make_model(LlamaConfig(**SIZES))


@pytest.fixture
def prompt():
    """Return ids and mask of two rows, the first padded by 7 on the left."""
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.fixture
def greedy():
    """Return options of greedy generation that never stops early."""
    return {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def fallbacks():
    """Return a function that runs a call and gives the messages of its fallbacks."""

    def record(call):
        fallback._said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        said = [w for w in caught if issubclass(w.category, fallback.FallbackWarning)]
        return result, [str(w.message) for w in said]

    return record


@pytest.fixture
def ids(request):
    """Return tokens: 60 of 3 rows, or of a module's own shape and seed."""
    shape, seed = getattr(request.module, "SHAPE_AND_SEED", ((3, 60), 5))
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield
