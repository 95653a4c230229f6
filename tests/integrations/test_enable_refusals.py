"""What `enable` refuses, what it leaves behind, and how it is undone."""

import copy
import pickle

import pytest
import torch
import transformers

from kvpact.errors import EnableError, KVPactError, SpecError
from kvpact.integrations.transformers import CompressedCache, disable, enable
from kvpact.integrations.transformers.versions import cache_of

COARSE = "int:bits=2,sinks=0,window=0"


class Holder(transformers.LlamaForCausalLM):
    """Leaves generating to a part of it, as image models do."""

    def __init__(self, config):
        super().__init__(config)
        self.part = transformers.LlamaForCausalLM(config)

    def generate(self, *args, **kwargs):
        return self.part.generate(*args, **kwargs)


class OwnWay(transformers.LlamaForCausalLM):
    """Makes its cache with a method of other parameters."""

    def _prepare_cache_for_generation(self, generation_config, batch_size, max_length):
        return None


class OwnCache(transformers.LlamaForCausalLM):
    """Makes a cache under a name of its own."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        model_kwargs["decoder_cache"] = object()


def mamba(config):
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64)
    )


def minimax(config):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    config = transformers.MiniMaxConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64, **sizes)
    return transformers.MiniMaxForCausalLM(config)


def static(config):
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.cache_implementation = "static"
    return model


@pytest.mark.parametrize(("make", "message"), [
    (mamba, "no layer of this model has full attention|has a cache of its own|layers with mamba"),
    (minimax, "MiniMaxForCausalLM has a cache of its own"),
    (OwnWay, "OwnWay makes its cache in a way of its own"),
    (Holder, r"leaves the work to a part of it: enable that part \(model.part\)"),
    (static, "cache_implementation='static': set model.generation_config"),
    (lambda config: torch.nn.Linear(2, 2), "that generates, or what wraps one, not Linear"),
])  # fmt: skip
def test_models_that_can_not_be_served(llama, make, message):
    model = make(llama.config)
    before = dict(vars(model))
    with pytest.raises(KVPactError, match=message):
        enable(model, COARSE)
    assert vars(model) == before


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("int:bits=99",), SpecError, "bits"),
    (({"default": "none", "layers": {"2": "fp8"}},), SpecError, "layer 2 is not among 2"),
])  # fmt: skip
def test_wrong_specs(llama, arguments, error, message):
    before = dict(vars(llama))
    with pytest.raises(error, match=message):
        enable(llama, *arguments)
    assert vars(llama) == before
    assert llama.config._attn_implementation == "sdpa"


def test_deferred_checks_that_nobody_would_read(llama):
    with pytest.raises(EnableError, match="flags that nobody reads"):
        enable(llama, check="deferred")


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_callers_that_name_another_cache(llama, prompt, greedy, kind):
    wanted = llama.generate(**prompt, **greedy)
    enable(llama, "none")
    with pytest.raises(EnableError, match="disable\\(model\\) first"):
        llama.generate(**prompt, **greedy, cache_implementation=kind)
    config = transformers.GenerationConfig(**greedy, cache_implementation=kind)
    with pytest.raises(EnableError, match="disable\\(model\\) first"):
        llama.generate(**prompt, generation_config=config)
    assert torch.equal(llama.generate(**prompt, **greedy), wanted)


def test_a_cache_under_another_name(llama, prompt, greedy):
    model = OwnCache(llama.config).eval()
    enable(model, COARSE)
    with pytest.raises(EnableError, match="OwnCache makes NoneType for its cache"):
        model.generate(**prompt, **greedy)


def test_another_spec_needs_a_disable_in_between(llama, prompt, greedy):
    enable(llama, COARSE)
    wanted = llama.generate(**prompt, **greedy)
    for arguments, options in ((("none",), {}), ((COARSE,), {"exact_new": False})):
        with pytest.raises(EnableError, match="enabled already, with int:bits=2"):
            enable(llama, *arguments, **options)
    with enable(llama, COARSE):  # the same again: nothing to do, and nothing to undo
        pass
    assert torch.equal(llama.generate(**prompt, **greedy), wanted)
    disable(llama)
    enable(llama, "none")


def test_disable_leaves_nothing(llama, make_model, prompt, greedy):
    before, exact = dict(vars(llama)), llama.generate(**prompt, **greedy)
    disable(llama)  # nothing to do
    with pytest.raises(RuntimeError, match="inside"), enable(llama, COARSE) as enabled:
        assert vars(llama) != before
        assert repr(enabled) == f"<Enabled: LlamaForCausalLM, with {COARSE}>"
        raise RuntimeError("inside")
    assert repr(enabled) == "<Enabled: LlamaForCausalLM, no longer enabled>"
    assert vars(llama) == before
    assert torch.equal(llama.generate(**prompt, **greedy), exact)
    assert all(not name.startswith("_prepare_cache") for name in vars(type(llama)))


def test_a_method_of_the_instance_itself_comes_back(llama, prompt, greedy):
    calls = []
    own = llama._prepare_cache_for_generation

    def mine(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    llama._prepare_cache_for_generation = mine
    with enable(llama, COARSE):
        result = llama.generate(**prompt, **greedy, return_dict_in_generate=True)
    assert isinstance(cache_of(result), CompressedCache)
    assert calls == [1]
    assert llama._prepare_cache_for_generation is mine


def test_copies_and_files(llama, prompt, greedy, tmp_path):
    """A copy is enabled by itself; files hold the model alone."""
    exact = llama.generate(**prompt, **greedy)
    llama.save_pretrained(tmp_path / "before")
    enable(llama, COARSE)
    wanted = llama.generate(**prompt, **greedy)
    twin = copy.deepcopy(llama)
    llama.save_pretrained(tmp_path / "enabled")
    data = pickle.dumps(llama)
    disable(llama)
    assert torch.equal(twin.generate(**prompt, **greedy), wanted)
    disable(twin)
    assert vars(twin).keys() == vars(llama).keys()
    assert torch.equal(twin.generate(**prompt, **greedy), exact)

    assert b"kvpact" not in data
    loaded = pickle.loads(data)
    assert torch.equal(loaded.generate(**prompt, **greedy), exact)
    with enable(loaded, COARSE):
        assert torch.equal(loaded.generate(**prompt, **greedy), wanted)
    assert torch.equal(loaded.generate(**prompt, **greedy), exact)

    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "enabled").iterdir())
    for name in files:
        one, two = (tmp_path / folder / name for folder in ("before", "enabled"))
        assert one.read_bytes() == two.read_bytes()
