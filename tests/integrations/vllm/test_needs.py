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

# 0.33 has it, and is not asked for more than 0.32 has.
SINCE = {"vllm.config.cache": {"register_kv_cache_dtype"}}


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
    for module, names in SINCE.items():
        assert used.pop(module) == names
    used["vllm.v1.kv_cache_interface"].remove("KVQuantMode")
    assert used == known


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
