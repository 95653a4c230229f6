"""The environment variable, and what it refuses."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from kvpact.calibration import Calibration, LayerCalibration
from kvpact.errors import BackendUnavailable, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import learnt_of
from kvpact.integrations.pages.page import codecs
from kvpact.integrations.vllm import CALIBRATION, SETTING, register, served_specs
from kvpact.integrations.vllm.calibrated import known_of, named
from kvpact.integrations.vllm.setting import native_plan
from kvpact.spec import parse_spec


def test_nothing_is_set(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    register()
    assert "vllm" not in sys.modules
    with pytest.raises(SpecError, match="KVPACT_VLLM_SPEC is not set"):
        served_specs(2)


@pytest.mark.parametrize("text", [
    "turboquant:bits=4,sinks=0", "turboquant:bits=4,sinks=0,window=0",
    "int:bits=8,sinks=0,window=0/turboquant:bits=3,sinks=0,window=0", "none",
])  # fmt: skip
def test_a_spec_is_set(monkeypatch, text):
    monkeypatch.setenv(SETTING, text)
    assert [str(spec) for spec in served_specs(3)] == [text] * 3


def test_a_recipe_is_set(monkeypatch, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('default = "turboquant:bits=4,sinks=0"\n[layers]\n-1 = "int:bits=8,sinks=0"\n')
    monkeypatch.setenv(SETTING, str(path))
    specs = [*["turboquant:bits=4,sinks=0"] * 2, "int:bits=8,sinks=0"]
    assert list(map(str, served_specs(3))) == specs


@pytest.mark.parametrize(("recipe", "reason"), [
    ('default = "none"\n[layers]\n3 = "fp8:sinks=0"', "layer 3 is not among 3 layers"),
    ('default = "none"\n[layers]\n1 = "fp8"', "write 'fp8:sinks=0'"),
    ('layers = "none"', "a recipe has 'default'"),
    (None, "can't be read"),
])  # fmt: skip
def test_what_pages_can_not_hold_in_one_layer_is_refused(monkeypatch, tmp_path, recipe, reason):
    path = tmp_path / "recipe.toml"
    if recipe is not None:
        path.write_text(recipe)
    monkeypatch.setenv(SETTING, str(path))
    with pytest.raises(SpecError, match=reason):
        served_specs(3)


@pytest.mark.parametrize(("text", "reason"), [
    ("turboquant:bits=4", "write 'turboquant:bits=4,sinks=0'"),
    ("int:bits=8,sinks=0/int:bits=4,sinks=0,window=9",
     "windows of equal width; write 'int:bits=8,sinks=0/int:bits=4,sinks=0'"),
    ("kivi:sinks=0,window=0", "packs 32 tokens together"),
    ("turboquant:bits=4,center=64,sinks=0,window=0", "method of K packs 64 tokens together"),
    ("vq:sinks=0", "method of K learns from its tokens"),
    ("lowrank:sinks=0,window=0", "learns from its tokens"),
    ("turbo", "turbo"),
])  # fmt: skip
def test_what_pages_can_not_hold_is_refused(monkeypatch, text, reason):
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SpecError, match=reason.replace(".", r"\.")):
        register()


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    """Return a function that sets both variables, to a file of some layers of the spec."""

    def run(text, layers=2, heads=2, learns="trellis:bits=4"):
        method = parse_spec(learns).key
        given = torch.randn(1, heads, 128, 64, generator=torch.Generator().manual_seed(1))
        state = method.key_codec(64, torch.float32).fit(given).state()
        one = LayerCalibration(heads, 64, 64, {method.learnt_name(): state})
        path = tmp_path / f"{layers}-{heads}-{len(learns)}.kvcal"
        Calibration(dict.fromkeys(range(layers), one), tokens=128).save(path)
        monkeypatch.setenv(SETTING, text)
        monkeypatch.setenv(CALIBRATION, str(path))
        return state

    return run


@pytest.mark.parametrize("text", ["trellis:bits=4,sinks=0", "trellis:bits=3,sinks=0/fp8:sinks=0"])
def test_what_codecs_learnt_is_that_of_their_layers(calibrated, text):
    state = calibrated(text)
    specs = served_specs(2)
    found = learnt_of(named(), [1], specs[:1], CacheGeometry(1, 2, 64), 2)
    assert found[0][0].keys() == state.keys() and found[0][1] == {}
    k, _ = codecs(specs[1], 64, 64, torch.float32, found[0])
    assert k.ready and k.group == 64
    assert all(torch.equal(k.state()[name], state[name]) for name in state)


def test_without_means_keys_are_packed_one_by_one(calibrated):
    text = "trellis:bits=4,center=0,sinks=0,window=0"
    calibrated(text, learns="trellis:bits=4,center=0")
    (spec,) = served_specs(1)
    (learnt,) = learnt_of(named(), [0], [spec], CacheGeometry(1, 2, 64), 2)
    assert codecs(spec, 64, 64, torch.float32, learnt)[0].group == 1


@pytest.mark.parametrize(("text", "reason"), [
    ("turboquant:bits=4,sinks=0", "learns nothing"),
    ("trellis:bits=4,sinks=0,window=32",
     "window, which is smaller; write 'trellis:bits=4,sinks=0'"),
    ("trellis:bits=4,sinks=0,first=false", "packs 64 tokens together"),
    ("trellis:bits=4", "write 'trellis:bits=4,sinks=0'"),
    ("vq:sinks=0", "learns from its tokens"),
])  # fmt: skip
def test_specs_that_a_calibration_does_not_help_are_refused(calibrated, text, reason):
    calibrated(text)
    with pytest.raises(SpecError, match=reason):
        register()


@pytest.mark.parametrize(("geometry", "numbers", "total", "spec", "reason"), [
    ((1, 3, 64), [0], 2, "trellis:bits=4", "the model has (3, 64, 64) KV heads"),
    ((1, 2, 32), [0], 2, "trellis:bits=4", "the model has (2, 32, 32) KV heads"),
    ((1, 2, 64), [2], 3, "trellis:bits=4", "has of layer 2 nothing"),
    ((1, 2, 64), [0], 1, "trellis:bits=4", "is of 2 layers, the model has 1"),
    ((1, 2, 64), [0], 2, "trellis:bits=4,weights=false", "run kvpact calibrate with --spec"),
])  # fmt: skip
def test_another_models_calibration_is_refused(calibrated, geometry, numbers, total, spec, reason):
    calibrated(f"{spec},sinks=0")
    with pytest.raises(SpecError, match=re.escape(reason)):
        learnt_of(named(), numbers, [parse_spec(spec)], CacheGeometry(*geometry), total)


def test_a_calibration_that_is_missing_or_stands_alone_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(CALIBRATION, str(tmp_path / "gone"))
    monkeypatch.delenv(SETTING, raising=False)
    with pytest.raises(SpecError, match="KVPACT_VLLM_SPEC is not"):
        register()
    monkeypatch.setenv(SETTING, "trellis:bits=4,sinks=0")
    with pytest.raises(SpecError, match="can't be read"):
        register()


def test_the_models_own_calibration_is_found_or_made(monkeypatch, tmp_path):
    monkeypatch.delenv(CALIBRATION, raising=False)
    monkeypatch.setenv(SETTING, "default")
    specs, asked = served_specs(2), []
    assert [str(spec) for spec in specs] == ["trellis:bits=4,sinks=0"] * 2

    def made(folder, wanted):
        asked.append((folder, list(wanted)))
        return Calibration({}, tokens=7)

    monkeypatch.setattr("kvpact.integrations.vllm.calibrated.of_files", made)
    model = SimpleNamespace(model=str(tmp_path), revision=None)
    for _ in range(2):
        assert known_of(model, specs).held.tokens == 7
    assert asked == [(tmp_path, [specs[0]])]
    assert known_of(model, [parse_spec("int:bits=8")]) is None
    with pytest.raises(SpecError, match=r"no/where are not on this machine: set KVPACT_"):
        known_of(SimpleNamespace(model="no/where", revision=None), specs)


def test_a_gpu_that_is_not_there_is_named():
    k, v = codecs(parse_spec("int:bits=8,sinks=0"), 64, 64, torch.bfloat16)
    device = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(BackendUnavailable, match="backend 'triton'"):
        native_plan(k, v, torch.bfloat16, device)
