"""What the plug-in looks for in vLLM when it starts is what its modules import of it."""

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import kvpact.integrations.vllm as plugin
from kvpact.errors import BackendUnavailable
from kvpact.integrations.vllm.needs import NEEDS, ON_CPU, check_needs

# Imported by `register` itself, before it looks for the others.
FIRST = {"vllm.platforms", "vllm.v1.attention.backends.registry"}


def trees():
    return [ast.parse(x.read_text()) for x in Path(plugin.__file__).parent.glob("*.py")]


def test_every_name_that_is_imported_is_looked_for():
    used = defaultdict(set)
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "vllm":
            used[node.module] |= {name.name for name in node.names}
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ops":
            used["vllm._custom_ops"].add(node.attr)
    assert used["vllm"] == {"envs", "_custom_ops"}
    used["vllm"].remove("_custom_ops")
    known = {module: set(names.split()) for module, names in {**NEEDS, **ON_CPU}.items()}
    assert {name: used[name] for name in used.keys() - FIRST} == known


def test_all_that_is_missing_is_named(monkeypatch):
    made = ModuleType("vllm_made_up")
    made.there = 1
    monkeypatch.setitem(sys.modules, "vllm_made_up", made)
    monkeypatch.setitem(sys.modules, "vllm_gone", None)
    check_needs({"vllm_made_up": "there"})
    with pytest.raises(BackendUnavailable) as caught:
        check_needs({"vllm_made_up": "one there two", "vllm_gone": "name"})
    for part in ("vllm_made_up.one", "vllm_made_up.two", "vllm_gone (", "install"):
        assert part in str(caught.value)
    assert "there" not in str(caught.value)
