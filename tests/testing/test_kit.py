"""The kit keeps to public names, so that it can judge caches that are not kvpact's."""

import ast
from importlib import import_module
from pathlib import Path

import torch

import kvpact
from kvpact import CacheGeometry, create_cache
from kvpact.cache import EngineCache

KIT = sorted((Path(kvpact.__file__).parent / "testing").glob("*.py"))
LIST_CACHE = Path(__file__).parent / "third_party" / "ternary" / "kvpact_listcache.py"


def private_names(source):
    """Attributes with a leading underscore, but for those of `self`."""
    return [
        f"{ast.unparse(node)}, line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "c"))
    ]


def test_the_kit_reads_no_private_name():
    found = {path.stem: private_names(path.read_text("utf-8")) for path in KIT}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_cache_of_others_is_short_and_imports_public_names():
    """Every name comes from a module that lists it in `__all__` (or is such a module)."""
    source = LIST_CACHE.read_text("utf-8")
    own = source[: source.index("class SharingFork")]
    assert len(own.splitlines()) <= 100
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvpact"):
            public = import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public), ast.unparse(node)


def test_caches_of_create_cache_have_what_engines_call():
    cache = create_cache("none", CacheGeometry(1, 1, 32, dtype=torch.float32))
    assert isinstance(cache, EngineCache)
    assert isinstance(kvpact.MLACache("none", 1, 32, 16), EngineCache)
