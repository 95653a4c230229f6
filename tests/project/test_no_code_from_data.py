"""Nothing in the package turns bytes into code."""

import ast
from pathlib import Path

import kvpact

FILES = sorted(Path(kvpact.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}


def unsafe(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [n.name for n in node.names if n.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Name) and node.id in CALLS:
            found.append(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and ((node.value.id, node.attr) in ATTRIBUTES or node.value.id == "pickle")
        ):
            found.append(f"{node.value.id}.{node.attr}")
    return found


def test_no_file_does():
    sources = {str(path): path.read_text("utf-8") for path in FILES}
    found = {path: unsafe(source) for path, source in sources.items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert [path for path, source in sources.items() if "allow_pickle" in source] == []


def test_the_check_itself_finds_them():
    assert len(FILES) > 80
    for text in ("import pickle", "from pickle import loads", "torch.load(x)", "eval('1')",
                 "exec(a)", "__import__('os')", "import yaml.loader"):  # fmt: skip
        assert unsafe(text), text
