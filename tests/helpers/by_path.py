"""Files of Python that belong to no package: examples, benchmarks, makers of golden files."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


def module_at(path: Path) -> ModuleType:
    """Run a file of Python, and return its module, which nobody else gets."""
    spec = spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module
