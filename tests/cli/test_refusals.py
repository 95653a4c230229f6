"""What the command line can't do is one line that names it, and leaves nothing behind."""

import json
import os
import socket

import pytest
from commands import bad, invoke


def refused(*args) -> str:
    """Return the one line of a command that fails."""
    (line,) = (x for x in bad(*args).strip().splitlines() if not x.startswith("loading model"))
    return line


@pytest.mark.parametrize("layers", [2**20 + 1, 10**12, 10**30])
def test_more_layers_than_there_can_be(layers):
    shape = ("--tokens", 10, "--kv-heads", 2, "--head-dim", 16)
    assert "num_layers" in refused("size", "int:bits=4", *shape, "--layers", layers)


@pytest.mark.parametrize(
    "option", [("--tokens", "0"), ("--tokens", "0k"), ("--batch", 0), ("--batch", 10**20)]
)
def test_caches_that_can_not_be(option):
    shape = ("--layers", 2, "--kv-heads", 2, "--head-dim", 16)
    assert " ".join(map(str, option)) in refused("size", "int:bits=4", *shape, *option)


@pytest.mark.parametrize(("changed", "told"), [
    ({"num_attention_heads": 0}, "can't load the config"),
    ({"num_key_value_heads": 0}, "can't be found without weights"),
    ({"num_hidden_layers": 0}, "tells of 0 layers"),
    ({"num_hidden_layers": 10**9}, "tells of 1000000000 layers"),
    ({"hidden_size": "wide"}, "can't load the config"),
])  # fmt: skip
def test_configs_of_models_that_can_not_be(tmp_path, changed, told):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, **changed}
    path.write_text(json.dumps(llama))
    line = refused("size", path, "int:bits=4")
    assert told in line and (str(path) in line or "LlamaConfig" in line)


def test_an_empty_spec_is_none():
    assert "text such as 'trellis:bits=4', not ''" in refused("generate", "a", "--spec", "")


def test_a_device_and_a_pipe_are_no_snapshots(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        for command in ("show", "verify"):
            assert f"{path} is no regular file" in refused("snapshot", command, path)


@pytest.fixture
def closed_port():
    """Yield a port of this host that nobody listens at, and nobody else can take."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("command", ["ls", "stats", "gc"])
def test_a_server_that_is_away_is_said_once(closed_port, command):
    pytest.importorskip("redis")
    line = refused("store", command, f"redis://127.0.0.1:{closed_port}")
    assert line.count(f"127.0.0.1:{closed_port}") >= 1 and line.count("does not answer") == 1


def test_a_server_is_named_as_it_is_reached(monkeypatch):
    redis = pytest.importorskip("redis")
    from kvpact.stores import RedisStore

    monkeypatch.setattr(redis.Redis, "ping", lambda self: True)
    for url in ("redis://", "redis:///3"):
        with RedisStore(url) as store:
            assert repr(store) == "RedisStore('localhost:6379')"


def test_a_failed_command_leaves_no_folder(tmp_path):
    out = tmp_path / "new" / "results"
    line = refused("eval", "int:bits=4", "--model", tmp_path / "no-model", "--out", out)
    assert "no-model" in line and not (tmp_path / "new").exists()
    assert "no-model" in refused("demo", "--model", tmp_path / "no-model")
    out.mkdir(parents=True)
    refused("eval", "int:bits=4", "--model", tmp_path / "no-model", "--out", out)
    assert out.is_dir(), "a folder that was there stays"


def test_every_model_and_text_is_looked_for_before_one_is_run(model_folder, tmp_path):
    models = ("--model", model_folder, "--model", tmp_path / "no-model")
    result = invoke("eval", "int:bits=4", *models)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no model folder") and "no-model" in result.stderr
    texts = ("--text", __file__, "--text", tmp_path / "no-text")
    assert "no-text" in refused("eval", "int:bits=4", "--model", model_folder, *texts)
