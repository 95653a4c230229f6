"""The commands of docs/vllm.md and docs/serving.md: each is one that its program takes."""

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from kvpact.calibration import Calibration, LayerCalibration
from kvpact.integrations.vllm.calibrated import CALIBRATION
from kvpact.integrations.vllm.setting import SETTING, served_specs

ROOT = Path(__file__).parents[2]
PAGES = ("vllm.md", "serving.md")
API_SERVER = ["python", "-m", "vllm.entrypoints.openai.api_server"]
LMCACHE = ["python", "-m", "kvpact.integrations.lmcache"]


def commands(page):
    """The words of each command in the blocks without a language."""
    text = (ROOT / "docs" / page).read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        if language:
            continue
        command = ""
        for line in block.splitlines():
            command += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quotation goes on in the next line
                continue
            if words and not line.endswith("\\"):
                yield words
                command = ""
        assert not command.strip(), block


ALL = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), ALL, ids=[f"{page}-{i}-{words[0]}" for i, (page, words) in enumerate(ALL)]
)
def test_a_command_of_the_page_is_taken(page, words, monkeypatch, tmp_path):
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        if value.startswith("trellis"):  # it learns
            Calibration({0: LayerCalibration(1, 64, 64)}).save(tmp_path / "model.kvcal")
            monkeypatch.setenv(CALIBRATION, str(tmp_path / "model.kvcal"))
        monkeypatch.setenv(name, value)
        others = CALIBRATION, "VLLM_USE_V2_MODEL_RUNNER"
        assert (name == SETTING and served_specs(30)) or name in others
    elif words[:3] == API_SERVER:
        # vLLM would look for the files of MODEL.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        check_vllm(words[3:])
    elif words[:3] == LMCACHE:
        check_lmcache(words[3:])
    elif words[0] == ".venv-vllm/bin/python":
        assert (ROOT / next(word for word in words if word.endswith(".py"))).exists()
    elif words[0] == "kvpact":
        monkeypatch.chdir(tmp_path)
        if "--calibration" in words:  # made by a command before
            Path(words[words.index("--calibration") + 1]).touch()
        check_kvpact(words[1:])
    elif words[:2] == ["pip", "install"]:
        extra = re.search(r"kvpact\[(\w+)\]", words[2])[1]
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    else:
        assert words[0] in ("curl", "mooncake_master", "mooncake_client", "tail"), words


def check_kvpact(words):
    typer = pytest.importorskip("typer")
    from kvpact.cli.app import app

    program = typer.main.get_command(app)
    parent = program.make_context("kvpact", words[:1], resilient_parsing=True)
    program.commands[words[0]].make_context(words[0], words[1:], parent=parent)


def check_vllm(words):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvpact.integrations.vllm.builder import CONNECTOR
    from kvpact.integrations.vllm.connector_store import options_of

    given = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    transfer = AsyncEngineArgs.from_cli_args(given).kv_transfer_config
    assert given.model == "MODEL" and given.block_size % 32 == 0
    if transfer is not None:
        assert transfer.kv_load_failure_policy == "recompute"
        module, name = transfer.kv_connector_module_path, transfer.kv_connector
        assert hasattr(importlib.import_module(module), name)
        if f"{module}.{name}" == CONNECTOR:
            options_of(transfer.kv_connector_extra_config)


def check_lmcache(words):
    pytest.importorskip("lmcache")
    from lmcache.cli.commands.server import ServerCommand

    from kvpact.integrations.lmcache.server import Served

    assert words[0] == "server"
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    given = parser.parse_args(words[1:])
    # LMCache's metrics need a package that neither it nor the environment of these tests installs.
    assert given.disable_metrics
    (adapter,) = (json.loads(x) if isinstance(x, str) else x for x in given.l2_adapter)
    assert adapter["type"] == "fs"
    serde = dict(adapter["serde"])
    assert serde.pop("type") == "kvpact"
    Served().make(serde)
