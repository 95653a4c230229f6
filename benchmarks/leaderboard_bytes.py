"""Bytes that an object holds in tensors, found by walking it."""

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

# What is the model's or the program's, and not the cache's.
_FOREIGN = (torch.nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
# What names the tensors that a tensor is made of, such as a quantised one.
FLATTEN = "__tensor_flatten__"
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def held_bytes(holder: Any) -> int:
    """Count the bytes of all tensors and arrays that can be reached from an object, a cache say.

    What a package reports of its bytes may leave out scales, windows or dense copies; these are
    whole storages (a view keeps all of its own alive), each one once. Attributes, slots, lists,
    tuples, sets and mappings are followed; models, modules, classes and functions are not.
    """
    sizes: dict[Any, int] = {}
    seen: set[int] = set()
    kept: list[Any] = []  # an id is a name only while what it names exists
    todo = [holder]
    while todo:
        found = todo.pop()
        if isinstance(found, _PLAIN + _FOREIGN) or id(found) in seen:
            continue
        seen.add(id(found))
        kept.append(found)
        if isinstance(found, numpy.ndarray):
            base = found if found.base is None else found.base
            sizes["numpy", id(base)] = getattr(base, "nbytes", found.nbytes)
        elif isinstance(found, Tensor) and not hasattr(found, FLATTEN):
            storage = found.untyped_storage()
            sizes[str(found.device), storage.data_ptr()] = storage.nbytes()
        else:
            todo.extend(_parts(found))
    return sum(sizes.values())


def _parts(found: Any) -> Iterator[Any]:
    """Yield what an object refers to."""
    if isinstance(found, Tensor):
        yield from (getattr(found, name) for name in getattr(found, FLATTEN)()[0])
        return
    if isinstance(found, Mapping):
        yield from found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        yield from found
    yield from getattr(found, "__dict__", {}).values()
    for kind in type(found).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(found, name, None)
