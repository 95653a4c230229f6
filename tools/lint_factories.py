"""Finds calls that make a tensor without naming both its dtype and its device.

Such a tensor is of whatever `torch.set_default_dtype` and `torch.set_default_device` of the program
say, and native code that writes fp32 into it writes somewhere else. `*_like` and `new_*` are free:
they take both from a tensor.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "IntTensor"}
NEEDED = ("dtype", "device")


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Return the line of each such call in a module, and what it lacks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for name in {alias.name for alias in node.names} & FACTORIES:
                yield node.lineno, f"torch.{name} is imported by name: call it as torch.{name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch":
            continue
        if name in LEGACY:
            yield node.lineno, f"torch.{name} takes no dtype: call torch.tensor or torch.empty"
        elif name in FACTORIES:
            missing = [word for word in NEEDED if word not in {k.arg for k in node.keywords}]
            if missing:
                yield node.lineno, f"torch.{name} without {' and '.join(missing)}"


def main(folders: list[str]) -> int:
    """Print the offences in all modules below some folders; return how many there are."""
    found = [
        f"{path}:{line}: {what}"
        for folder in folders
        for path in sorted(Path(folder).rglob("*.py"))
        for line, what in offences(path.read_text("utf-8"))
    ]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
