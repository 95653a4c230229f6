"""Where the backend is, what loads it, and `enable` beside libraries that stand for a ggml."""

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
from fake_ggml import GGML, PLUGIN, compiled

from kvpact.errors import BackendUnavailable
from kvpact.integrations.llama_cpp import backend, enable, environment, library


@pytest.fixture
def named(tmp_path, monkeypatch):
    path = tmp_path / "libggml-kvpact.so"
    path.touch()
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(path))
    return path


@pytest.fixture
def loading(tmp_path, monkeypatch):
    """Has a process load a ggml and, as kvpact's, a backend."""

    def load(plugin=PLUGIN, *options):
        path = compiled(tmp_path / "plugin.so", plugin, *options)
        monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(path))
        file = compiled(tmp_path / "lib" / "libggml.so.0", GGML)
        return file, ctypes.CDLL(str(file))

    return load


def test_the_library_is_the_one_that_is_named_or_none(named, monkeypatch):
    assert library() == named
    load = {"GGML_BACKEND_PATH": str(named)}
    assert environment(every_program=False) == load
    assert environment() == load | {"LLAMA_ARG_OVERRIDE_TENSOR": "none=CPU"}
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(named.with_name("other.so")))
    with pytest.raises(BackendUnavailable, match=r"no backend for ggml at .*other\.so"):
        environment()


def test_it_is_looked_for_in_both_folders_of_an_editable_install(tmp_path, monkeypatch):
    package = sys.modules["kvpact.integrations.llama_cpp"]
    monkeypatch.delenv("KVPACT_GGML_LIBRARY", raising=False)
    monkeypatch.setattr(package, "__path__", [str(tmp_path / "sources"), str(tmp_path)])
    path = tmp_path / "libggml-kvpact.so"
    path.touch()
    assert library() == path


def test_enable_loads_once_behind_the_backends_of_any_ggml(loading):
    file, ggml = loading(PLUGIN, "-DREFUSED=0")
    # A library that is linked with it shows its functions, too, and is no ggml of its own; a copy,
    # as wheels hold them in place of links, has a registry of its own.
    linked = compiled(file.with_name("libllama.so"), "", "-Wl,--no-as-needed", file)
    copy = Path(shutil.copy(file, file.with_name("libggml.so")))
    _, other = ctypes.CDLL(str(linked)), ctypes.CDLL(str(copy))
    for _ in range(2):
        enabled = enable()
        assert set(enabled.libraries) == {file, copy}
        assert ggml.fake_loads() == other.fake_loads() == ggml.ggml_backend_reg_count() == 1
    assert enabled.found == "ggml 9.9.9, interface 6"
    assert enabled.attentions == 1 << 40  # more than an int holds


def test_a_refusal_is_raised_with_the_backends_line(loading, monkeypatch):
    file, ggml = loading(PLUGIN, "-DREFUSED=1")
    monkeypatch.setattr(backend, "_libraries", lambda: [str(file)])
    for times in (1, 2):
        with pytest.raises(BackendUnavailable, match=rf"into {file}: ggml 9\.9\.9: odd$"):
            enable()
        assert ggml.fake_loads() == times


def test_enable_is_refused_before_an_import(loading, monkeypatch):
    loading(PLUGIN, "-DREFUSED=0")
    others = ["/nowhere/libggml.so", str(library())]
    monkeypatch.setattr(backend, "_libraries", lambda: others)
    with pytest.raises(BackendUnavailable, match="after the import of a binding"):
        enable()


@pytest.mark.parametrize("plugin", ["", None], ids=["no functions", "no library"])
def test_what_is_no_backend_is_refused(loading, named, plugin, monkeypatch):
    if plugin is not None:
        loading(plugin)
    with pytest.raises(BackendUnavailable, match=r"\.so is not kvpact's backend for ggml: "):
        enable()
