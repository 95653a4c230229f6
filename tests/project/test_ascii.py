"""What Python prints of kvpact is ASCII: reprs and errors show on every terminal."""

import ast
from pathlib import Path

import kvpact
import kvpact.errors
from kvpact.stores import open_store

SOURCE = Path(kvpact.errors.__file__).parent
TABLES = (
    "cli", "testing", "evaluate/report.py", "evaluate/task_scores.py", "evaluate/free_running.py",
)  # fmt: skip


def _texts(path):
    """Yield the strings of a module that are no docstrings, and their lines."""
    tree = ast.parse(path.read_text("utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_no_text_of_a_repr_or_an_error_has_another_sign():
    found = [
        (str(name), line, text)
        for path in SOURCE.rglob("*.py")
        if not str(name := path.relative_to(SOURCE).as_posix()).startswith(TABLES)
        for line, text in _texts(path)
        if not text.isascii()
    ]
    assert found == []


def test_caches_and_stores_print_as_ascii(tmp_path):
    shape = kvpact.CacheGeometry(1, 2, 64)
    paged = kvpact.PagedKVCache("int:bits=4", shape, 4)
    for cache in (kvpact.create_cache("int:bits=4", shape), paged):
        assert repr(cache).isascii() and repr(cache).endswith(" int:bits=4 | empty>")
    with open_store(str(tmp_path / "モデル")) as store:
        assert repr(store).isascii() and r"\u30e2" in repr(store)
