"""Weights that are not plain tensors of an `nn.Linear` that are there."""

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import accelerate
import pytest
import torch
import weights_process
from torch import nn

from kvpact import parse_spec
from kvpact.errors import KVPactError, MismatchError
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import calibrate, key_offsets, prefix_cache, versions
from kvpact.integrations.transformers.attention.calibrate import key_rotations, output_energies
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.layers.made_keys import KeyMaker
from kvpact.integrations.transformers.model import offsets
from kvpact.integrations.transformers.versions import named
from kvpact.stores import open_store

SPEC = "int:bits=8"
IDS = torch.arange(90)[None] % 64


def read(model):
    return {layer: astuple(offset) for layer, offset in key_offsets(model).items()}


def spoilt(change):
    model = weights_process.qwen2()
    for layer in model.model.layers:
        change(layer.self_attn)
    return model


def tokens(model, cache=None):
    more = {} if cache is None else named(cache)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model.generate(IDS, **more, **options).tolist()


@pytest.fixture(params=[
    {}, {"offload_buffers": True}, {"preload_module_classes": ["Qwen2Attention"]},
    {"preload_module_classes": ["Qwen2DecoderLayer"]}, {"offload_dir": "disk"},
], ids=["cpu", "buffers", "attention", "layer", "disk"])  # fmt: skip
def offloaded(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"execution_device": "cpu", **request.param}
    offload = accelerate.disk_offload if "offload_dir" in options else accelerate.cpu_offload
    return offload(weights_process.qwen2(), **options)


def test_offloaded_weights_are_those_of_the_model(offloaded, fallbacks, monkeypatch):
    model, reads, real = weights_process.qwen2(), [], offsets._found
    monkeypatch.setattr(offsets, "_found", lambda places: reads.append(1) or real(places))
    wanted = tokens(model, CompressedCache(model, SPEC))
    found, said = fallbacks(lambda: tokens(offloaded, CompressedCache(offloaded, SPEC)))
    assert found == wanted and not said
    assert read(offloaded) == read(model) and read(model).keys() == {0, 1}
    assert len(reads) == 2  # one for each model
    assert model_fingerprint(offloaded) == model_fingerprint(model)
    for part in (output_energies, key_rotations):
        assert str(part(offloaded)) == str(part(model))
    assert offloaded.model.layers[0].self_attn.k_proj.bias.is_meta


def test_a_config_alone_brings_a_warning_of_whatever_holds_the_bias(offloaded, fallbacks):
    for model, text in ((offloaded, "norm 56"), (spoilt(swap(Around)), "is not known")):
        call = lambda model=model: tokens(model, CompressedCache(model.config, SPEC))  # noqa: E731
        (message,) = fallbacks(call)[1]
        assert text in message


@pytest.mark.parametrize("given", [None, "mine"])
def test_prefixes_of_an_offloaded_model_are_stored_and_loaded(given):
    offloaded = accelerate.cpu_offload(weights_process.qwen2(), execution_device="cpu")
    store, found = open_store("memory://"), []
    for held in (0, 64):
        cache = CompressedCache(offloaded, SPEC)
        prefixes = prefix_cache(store, offloaded, cache, fingerprint=given)
        assert prefixes.load(IDS[:, :-1]) == held
        prefixes.prefill(IDS)
        found.append(tokens(offloaded, cache))
    assert found[0] == found[1]


def test_an_offloaded_model_is_calibrated_as_one_that_is_there():
    texts, specs = [torch.arange(140) % 64], [parse_spec("pca:bits=4")]
    model = weights_process.qwen2()
    wanted = calibrate(model, texts, specs)
    offloaded = accelerate.cpu_offload(weights_process.qwen2(), execution_device="cpu")
    found = calibrate(offloaded, texts, specs)
    assert found.model == wanted.model and str(found.layers) == str(wanted.layers)
    cache = CompressedCache(offloaded, "pca:bits=4", calibration=found)
    same = CompressedCache(model, "pca:bits=4", calibration=wanted)
    assert tokens(offloaded, cache) == tokens(model, same)


class Packed(nn.Module):
    """A projection with a bias and no `weight`."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / self.scale).round().char())
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.qweight * self.scale, self.bias)


class Around(nn.Module):
    """A projection around another, as adapters are, which shows nothing of it."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear

    def forward(self, x):
        return self.base(x)


class Adapter(Around):
    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)


def swap(make):
    return lambda attention: setattr(attention, "k_proj", make(attention.k_proj))


def stored_as(dtype):
    def change(attention):
        weight = attention.k_proj.weight
        attention.k_proj.weight = nn.Parameter(weight.data.to(dtype), requires_grad=False)

    return change


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_a_bias_that_can_be_read_is_taken_whatever_holds_the_weights(fallbacks):
    plain = weights_process.qwen2()
    exact = [layer.self_attn.k_proj.bias.view(2, 16) for layer in plain.model.layers]
    int8 = {"qconfig_spec": {nn.Linear}, "dtype": torch.qint8}
    dynamic = torch.ao.quantization.quantize_dynamic(weights_process.qwen2(), **int8)
    models = [spoilt(swap(Packed)), spoilt(swap(Adapter)), dynamic]
    models += [spoilt(stored_as(dtype)) for dtype in (torch.int8, torch.float8_e4m3fn)]
    for model in models:
        found, said = fallbacks(lambda model=model: key_offsets(model))
        assert not said and found.keys() == {0, 1}
        for layer, offset in found.items():
            taken = torch.zeros(2, 16)
            taken[:, offset.channels] = torch.tensor(offset.bias)
            assert torch.equal(taken, exact[layer])
    for model in models[:3]:
        cache = CompressedCache(model, "none")
        assert tokens(model, cache) == tokens(model)
    assert len({model_fingerprint(model) for model in (plain, *models)}) == 6


def empty(attention):
    attention.k_proj.bias.data = torch.empty(0)


def freed(attention):
    attention.k_proj.bias.untyped_storage().resize_(0)


def packed(attention):
    del attention.k_proj
    attention.qkv_proj = nn.Linear(64, 128)


@pytest.mark.parametrize(("kind", "change", "why"), [
    ("around", swap(Around), "'bias' of a Around"),
    ("lazy", swap(lambda _: nn.LazyLinear(32)), "'bias' of a LazyLinear"),
    ("meta", lambda attention: attention.to("meta"), "'bias' of a Linear"),
    ("empty", empty, "'bias' of a Linear"),
    ("freed", freed, "'bias' of a Linear"),
    ("packed", packed, "which part of a Qwen2Attention"),
])  # fmt: skip
def test_a_bias_that_can_not_be_read_is_told_once(kind, change, why, fallbacks):
    model = spoilt(change)

    def said(*args, **options):
        caches = lambda: [CompressedCache(model, *args, **options) for _ in range(2)]  # noqa: E731
        made, said = fallbacks(caches)
        assert not made[0]._shared.key_offsets
        return said

    (message,) = said(SPEC)
    assert why in message and "costs precision below 8 bits" in message
    assert fallbacks(lambda: key_offsets(model)) == ({}, [message])
    assert not said("none") and not said(SPEC, key_offsets=None)
    if kind in ("lazy", "meta", "empty", "freed"):
        with pytest.raises(MismatchError, match=r"k_proj.*can't be read.*fingerprint="):
            model_fingerprint(model)


class Scaled(torch.Tensor):
    """Integers with a scale, as libraries that quantise have them: few operations are known."""

    @staticmethod
    def __new__(cls, q, scale, more):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)

    def __init__(self, q, scale, more):
        self.q, self.scale, self.more = q, scale, more

    def __tensor_flatten__(self):
        return ["q", "scale"], {"more": self.more}

    def dequantize(self):
        return self.q * self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale, args[0].more)
        raise NotImplementedError(str(function))


def scaled(more="a", add=0, bias=False):
    def change(attention):
        for name in ("weight", "bias")[: 1 + bias]:
            whole = getattr(attention.k_proj, name).data
            scale = whole.abs().amax() / 100
            part = Scaled((whole / scale).round().char() + add, scale, more)
            setattr(attention.k_proj, name, nn.Parameter(part, requires_grad=False))

    return change


def test_classes_of_others_are_read_as_they_say_themselves():
    wanted = read(weights_process.qwen2())
    for bias in (False, True):
        found = read(spoilt(scaled(bias=bias)))
        assert found.keys() == {0, 1} and found[0][1] == wanted[0][1]
    made = [scaled(), scaled(), scaled(more="b"), scaled(add=1)]
    first, same, *others = (model_fingerprint(spoilt(change)) for change in made)
    assert first == same and len({first, *others}) == 3
    with pytest.raises(MismatchError, match="Scaled"):
        model_fingerprint(spoilt(scaled(more=object())))


def test_prefixes_of_weights_that_can_not_be_read_need_a_fingerprint():
    model = weights_process.qwen2()
    model.lm_head = type("Strange", (nn.Linear,), {"get_extra_state": object})(64, 64)
    cache = CompressedCache(model, SPEC)
    with pytest.raises(MismatchError, match=r"lm_head\._extra_state.*fingerprint="):
        prefix_cache(open_store("memory://"), model, cache)
    prefixes = prefix_cache(open_store("memory://"), model, cache, fingerprint="mine")
    assert prefixes.prefill(IDS) == 64


def test_keys_made_by_weights_that_can_not_be_read_are_refused_by_name():
    attention = nn.Module()
    attention.k_norm = nn.LayerNorm(16, device="meta")
    with pytest.raises(KVPactError, match="k_eq_v=False"):
        KeyMaker(lambda: attention, lambda: None, None).begun()


def test_processes_that_share_a_model_read_their_part(tmp_path):
    if not versions.KEEPS_LATENTS:
        pytest.skip("transformers before 5.15 shards otherwise")
    program = Path(weights_process.__file__)
    command = [sys.executable, program]
    ranks = [subprocess.Popen([*command, str(x), tmp_path, "tensor", "data"]) for x in (0, 1)]
    assert [process.wait(timeout=240) for process in ranks] == [0, 0]
    alone = json.loads(json.dumps(weights_process.read(weights_process.qwen2(), "memory://")))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    # FSDP2: heads are all there when a layer computes, as in one process.
    assert found["data0"] == found["data1"] == alone
    parts = [found["tensor0"], found["tensor1"]]
    for layer, (channels, bias) in enumerate(alone["offsets"]):
        for head, part in enumerate(parts):
            own = {tuple(c): b for c, b in zip(channels, bias[head], strict=True) if any(b)}
            places, (values,) = part["offsets"][layer]
            assert {tuple(c): b for c, b in zip(places, values, strict=True)} == own
            assert part["energies"][layer] == [alone["energies"][layer][head]]
    for name in ("key", "fingerprint"):
        assert len({parts[0][name], parts[1][name], alone[name]}) == 3
    for part in parts:
        (first, text), (second, again) = part["text"]
        assert [first, second] == [0, 64] and text == again == alone["text"][0][1]
