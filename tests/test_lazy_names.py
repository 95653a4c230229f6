"""``import kvpact`` is quick: names are imported when they are first used."""

import ast
import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvpact


def test_all_names_are_there_and_known_to_type_checkers():
    source = ast.parse(Path(kvpact.__file__).read_text("utf-8"))
    choices = [node for node in source.body if isinstance(node, ast.If)]
    (block,) = (node for node in choices if not isinstance(node.test, ast.UnaryOp))
    told = {name.name: part.module for part in block.body for name in part.names}
    assert told == kvpact._HOMES
    transformers = {"CompressedCache", "FallbackWarning", "calibration_of", "disable", "enable"}
    if find_spec("transformers") is None:
        told = {name: told[name] for name in told.keys() - transformers}
    assert {*told, "errors", "evaluate", "recommend"} == {*kvpact.__all__}
    for name, module in told.items():
        assert getattr(kvpact, name) is getattr(import_module(module), name)
    assert {*told, "evaluate"} <= {*dir(kvpact)}
    assert not {"TYPE_CHECKING", "find_spec", "import_module", "sys"} & {*dir(kvpact)}
    for package in (kvpact.evaluate, kvpact.recommend):
        assert next(iter(inspect.signature(package).parameters)) == "model"


def test_nothing_is_imported_before_it_is_used():
    """Neither torch, nor methods, nor what kernels, stores and engines are for."""
    code = (
        "import sys, kvpact; assert 'torch' not in sys.modules\n"
        "assert kvpact.methods.Method and kvpact.errors.SpecError\n"
        "names = ['turboquant', 'kvarn', 'kivi', 'fp8', 'aliases']\n"
        "loaded = lambda: [n for n in names if 'kvpact.methods.' + n in sys.modules]\n"
        "assert not loaded()\n"
        "kvpact.parse_spec('kvarn'); assert loaded() == ['kvarn'], loaded()\n"
        "assert kvpact.integrations.sizes.size\n"
        "assert kvpact.create_cache is kvpact.create_cache and 'torch' in sys.modules\n"
        "import kvpact.stores, kvpact.integrations.lmcache, kvpact.integrations.vllm\n"
        "extras = {'cryptography', 'fsspec', 'lmcache', 'redis', 'triton', 'vllm'}\n"
        "assert not extras & sys.modules.keys(), extras & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there_is_told():
    with pytest.raises(AttributeError, match="module 'kvpact' has no attribute 'create_cahce'"):
        kvpact.create_cahce  # noqa: B018
    with pytest.raises(ImportError, match="has no attribute 'KnormPress'; write: kvpact"):
        from kvpact import KnormPress  # noqa: F401
    with pytest.raises(ImportError, match="'CompressedCache'; write: from kvpact import Com"):
        from kvpact.stores import CompressedCache  # noqa: F401
    assert not hasattr(kvpact, "_nothing") and not hasattr(kvpact, "__wrapped__")


def test_what_steps_call_is_called_as_it_is():
    pytest.importorskip("transformers")
    whole = kvpact.CompressedCache, kvpact.PagedKVCache, kvpact.cache.ContiguousCache
    assert not any(hasattr(x, "__getattr__") for x in whole) and all(x.snapshot.told for x in whole)
    for kind in (x for one in whole for x in one.__mro__):
        names = {"append", "attend", "step", "store", "update"} & vars(kind).keys()
        assert not any(hasattr(vars(kind)[name], "told") for name in names)
    assert not hasattr(kvpact.AttendConfig.__init__, "told")


def test_a_variable_that_there_is_not_is_told():
    command, env = [sys.executable, "-c", "import kvpact"], {**os.environ, "KVPACT_SPEC": "int4"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert "no variable KVPACT_SPEC" in done.stderr and done.stderr.count("Warning") == 1


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "kvpact", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"kvpact {kvpact.__version__}\n", done.stderr


def test_star_imports_need_no_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from kvpact import *; import kvpact\n"
        "assert create_cache and 'CompressedCache' in dir(kvpact)\n"
        "try: kvpact.CompressedCache\n"
        "except kvpact.errors.BackendUnavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'kvpact[transformers]'" in done.stdout, done.stderr
