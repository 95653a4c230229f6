"""Where the backend is, what loads it, what `enable` refuses, beside a stand-in of its package."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvpact.errors import BackendUnavailable, EnableError
from kvpact.integrations.llama_cpp import backend, enable, environment, library


@pytest.fixture
def named(tmp_path, monkeypatch):
    path = tmp_path / "libggml-kvpact.so"
    path.touch()
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(path))
    return path


@pytest.fixture
def llama(named, monkeypatch):
    """A llama-cpp-python whose registry takes what it is told to load."""
    devices = []

    def function(call):
        return type("Function", (), {"__call__": call})()

    package, ggml = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_cpp")
    package.Llama, package.loads = type("Llama", (), {}), True
    ggml._lib = SimpleNamespace(
        ggml_backend_dev_by_name=function(lambda _, name: int(name in devices)),
        ggml_backend_load=function(lambda _, path: package.loads and devices.append(b"KVPACT")),
        ggml_backend_reg_count=function(lambda _: len(devices)),
        ggml_backend_load_all=function(lambda _: devices.append(b"CPU")),
    )
    package.devices = devices
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", ggml)
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "llama_cpp")
    monkeypatch.setattr(backend, "version", lambda name: "1.2.3")
    monkeypatch.setattr(backend, "refusal", lambda path: "")
    return package


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


def test_enable_loads_once_behind_llama_cpps_own_backends(llama):
    enable()
    assert llama.devices == [b"CPU", b"KVPACT"]
    llama.Llama._Llama__backend_initialized = True
    enable()  # a model was made since: nothing is to be done
    assert llama.devices == [b"CPU", b"KVPACT"]


def test_enable_is_refused_after_a_model(llama):
    llama.Llama._Llama__backend_initialized = True
    with pytest.raises(EnableError, match=r"before the first Llama\(\.\.\.\)"):
        enable()
    assert llama.devices == []


def test_enable_is_refused_without_llama_cpp_python(named, monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="pip install llama-cpp-python"):
        enable()


def test_a_version_that_was_not_tried_is_refused_by_name(llama, monkeypatch):
    monkeypatch.setattr(backend, "refusal", lambda path: "ggml 9.9.9 was not tried")
    with pytest.raises(BackendUnavailable, match=r"llama-cpp-python 1\.2\.3: ggml 9\.9\.9 was"):
        enable()
    assert llama.devices == []


def test_enable_does_not_believe_a_load_without_a_device(llama):
    llama.loads = False
    with pytest.raises(BackendUnavailable, match=r"1\.2\.3 did not load .*its log says why"):
        enable()


def test_what_is_no_backend_is_refused(named):
    assert "libggml-kvpact.so" in backend.refusal(named)  # an empty file is no library
