"""The environment variable, and what it refuses."""

import subprocess
import sys

import pytest
import torch

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.vllm import SETTING, register, served_spec
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.spec import parse_spec


def test_nothing_is_set(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    assert served_spec() is None
    register()
    assert "vllm" not in sys.modules


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
    assert str(served_spec()) == text


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
        ("recipe.toml", "a recipe by layer is not covered"),
        ("turbo", "turbo"),
    ],
)
def test_what_pages_can_not_hold_is_refused(monkeypatch, text, reason):
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SpecError, match=reason.replace(".", r"\.")):
        register()


def test_importing_kvpact_imports_nothing_of_vllm():
    code = "import sys, kvpact, kvpact.integrations.vllm; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gpu_that_is_not_there_is_named():
    k, v = codecs(parse_spec("int:bits=8,sinks=0"), 64, 64, torch.bfloat16)
    device = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(BackendUnavailable, match="backend 'triton'"):
        native_plan(k, v, torch.bfloat16, device)
