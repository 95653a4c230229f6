"""`examples/custom_generate` through transformers' own way of loading such a folder."""

import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from cross_attention_models import PAIRED, made, source
from packaging.requirements import Requirement
from transformers import (
    AutoModelForCausalLM,
    EncoderDecoderCache,
    cache_utils,
    dynamic_module_utils,
)

import kvpact
from kvpact.errors import SpecError
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import cache_of, named

FOLDER = Path(__file__).parents[2] / "examples" / "custom_generate"
COARSE = "int:bits=2,sinks=0,window=0"
"""So coarse that its greedy tokens differ from the exact ones: equal ones tell which cache ran."""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Let transformers copy modules to a folder of the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def run(model, prompt, greedy, **more):
    more |= {"custom_generate": str(FOLDER), "trust_remote_code": True}
    return model.generate(**prompt, **greedy, **more)


def test_the_folder_gives_the_tokens_of_a_compressed_cache(llama, prompt, greedy):
    exact = llama.generate(**prompt, **greedy)
    wanted = llama.generate(**prompt, **greedy, **named(CompressedCache(llama, COARSE)))
    assert not torch.equal(wanted, exact)
    assert torch.equal(run(llama, prompt, greedy, spec=COARSE), wanted)
    default = cache_of(run(llama, prompt, greedy, return_dict_in_generate=True))
    assert default.stats()["spec"] == "trellis:bits=4"
    own = CompressedCache(llama, "none")
    assert torch.equal(run(llama, prompt, greedy, **named(own)), exact)
    assert own.get_seq_length() == 51
    assert torch.equal(run(llama, prompt, greedy, use_cache=False), exact)


def test_a_model_loaded_with_the_folder_generates_with_it(llama, prompt, greedy, tmp_path):
    wanted = llama.generate(**prompt, **greedy, **named(CompressedCache(llama, COARSE)))
    llama.save_pretrained(tmp_path / "model")
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "model" / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    assert torch.equal(model.generate(**prompt, **greedy, spec=COARSE), wanted)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    assert torch.equal(model.generate(ids, attention_mask=mask, **greedy, spec=COARSE), wanted)


def test_what_is_refused(llama, prompt, greedy):
    with pytest.raises(SpecError, match="bits"):
        run(llama, prompt, greedy, spec="int:bits=99")
    with pytest.raises(ValueError, match="cache_implementation"):
        run(llama, prompt, greedy, cache_implementation="static")
    if not hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING"):
        return  # transformers before 5.15 trusts folders
    with pytest.raises(ValueError, match="trust_remote_code"):
        llama.generate(**prompt, **greedy, custom_generate=str(FOLDER), trust_remote_code=False)


def test_encoder_decoder_models_have_a_pair_of_caches(greedy):
    pair = run(made(PAIRED, "t5", 2), source("t5"), greedy, return_dict_in_generate=True)
    assert isinstance(cache_of(pair), EncoderDecoderCache)
    assert cache_of(pair).self_attention_cache.stats()["spec"] == "trellis:bits=4"


def test_requirements_are_met_by_this_package_and_what_it_asks_for():
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    asked = (FOLDER / "custom_generate" / "requirements.txt").read_text().split()
    own, lower = (Requirement(line) for line in asked)
    assert own.name == "kvpact" and own.specifier.contains(kvpact.__version__)
    extra = project["optional-dependencies"]["transformers"]
    (wanted,) = (x for x in map(Requirement, extra) if x.name == "transformers")
    assert lower.name == "transformers" and set(lower.specifier) <= set(wanted.specifier)
