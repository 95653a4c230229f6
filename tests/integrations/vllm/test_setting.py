"""The environment variable, and what it refuses."""

import sys

import pytest
import torch

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.vllm import SETTING, register, served_specs
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.spec import parse_spec


def test_nothing_is_set(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    register()
    assert "vllm" not in sys.modules
    with pytest.raises(SpecError, match="KVPACT_VLLM_SPEC is not set"):
        served_specs(2)


@pytest.mark.parametrize(
    "text",
    [
        "turboquant:bits=4,sinks=0",
        "turboquant:bits=4,sinks=0,window=0",
        "int:bits=8,sinks=0,window=0/turboquant:bits=3,sinks=0,window=0",
        "none",
    ],
)
def test_a_spec_is_set(monkeypatch, text):
    monkeypatch.setenv(SETTING, text)
    assert [str(spec) for spec in served_specs(3)] == [text] * 3


def test_a_recipe_is_set(monkeypatch, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('default = "turboquant:bits=4,sinks=0"\n[layers]\n-1 = "int:bits=8,sinks=0"\n')
    monkeypatch.setenv(SETTING, str(path))
    assert [str(spec) for spec in served_specs(3)] == [
        *["turboquant:bits=4,sinks=0"] * 2,
        "int:bits=8,sinks=0",
    ]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ('default = "none"\n[layers]\n3 = "fp8:sinks=0"', "layer 3 is not among 3 layers"),
        ('default = "none"\n[layers]\n1 = "fp8"', "write 'fp8:sinks=0'"),
        ('layers = "none"', "a recipe has 'default'"),
        (None, "can't be read"),
    ],
)
def test_what_pages_can_not_hold_in_one_layer_is_refused(monkeypatch, tmp_path, recipe, reason):
    path = tmp_path / "recipe.toml"
    if recipe is not None:
        path.write_text(recipe)
    monkeypatch.setenv(SETTING, str(path))
    with pytest.raises(SpecError, match=reason):
        served_specs(3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("turboquant:bits=4", "write 'turboquant:bits=4,sinks=0'"),
        (
            "int:bits=8,sinks=0/int:bits=4,sinks=0,window=9",
            "windows of equal width; write 'int:bits=8,sinks=0/int:bits=4,sinks=0'",
        ),
        ("kivi:sinks=0,window=0", "packs 32 tokens together"),
        ("turboquant:bits=4,center=64,sinks=0,window=0", "method of K packs 64 tokens together"),
        ("trellis:bits=4,sinks=0,window=0", "method of K learns from its tokens"),
        ("lowrank:sinks=0,window=0", "learns from its tokens"),
        ("turbo", "turbo"),
    ],
)
def test_what_pages_can_not_hold_is_refused(monkeypatch, text, reason):
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SpecError, match=reason.replace(".", r"\.")):
        register()


def test_a_gpu_that_is_not_there_is_named():
    k, v = codecs(parse_spec("int:bits=8,sinks=0"), 64, 64, torch.bfloat16)
    device = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(BackendUnavailable, match="backend 'triton'"):
        native_plan(k, v, torch.bfloat16, device)
