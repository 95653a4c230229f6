"""The tensors an object holds: every one that can be reached from it, and its bytes."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, type, ModuleType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, type(threading.Lock()), type(threading.RLock())),
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def held_tensors(root: object) -> dict[str, Tensor]:
    """Return every tensor reachable from an object, by its path.

    Parameters
    ----------
    root : object
        Attributes, slots, containers, bound methods and closures are followed; classes, modules
        and the globals of functions are not, so what a process has once is left out. Of an object
        that reserves memory for tokens to come, the result of its method `held_parts` is followed
        instead: views of what it holds.

    Returns
    -------
    dict
        Each tensor object once, under the first path that leads to it, in the objects' own order.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, object] = {}
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            found[path] = item
        else:
            stack.extend(reversed([(path + step, child) for step, child in _children(item)]))
    return found


def _children(item: Any) -> Iterator[tuple[str, object]]:
    parts = getattr(item, "held_parts", None)
    if isinstance(parts, MethodType):
        yield from _children(parts())
    elif isinstance(item, Mapping):
        for number, (key, value) in enumerate(item.items()):
            yield f".key({number})", key
            yield f"[{key!r}]" if isinstance(key, str | int) else f"[{number}]", value
    elif isinstance(item, list | tuple | set | frozenset):
        yield from ((f"[{number}]", child) for number, child in enumerate(item))
    elif isinstance(item, MethodType):
        yield ".__self__", item.__self__
    elif isinstance(item, FunctionType):
        for number, cell in enumerate(item.__closure__ or ()):
            try:
                yield f".closure({number})", cell.cell_contents
            except ValueError:  # an empty cell
                continue
    else:
        for owner in type(item).__mro__:
            slots = vars(owner).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(item, name):
                    yield f".{name}", getattr(item, name)
        for name, value in getattr(item, "__dict__", {}).items():
            yield f".{name}", value


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def held_bytes(root: object, constants: object = None) -> int:
    """Return the bytes of all tensor memory reachable from an object.

    Parameters
    ----------
    root : object
        See `held_tensors`. A view counts with all the memory that it keeps alive; shared memory
        counts once.
    constants : object
        What can be reached from it belongs to the process, not to `root`, and isn't counted.
    """
    shared = _storages(held_tensors(constants).values())
    held = _storages(held_tensors(root).values())
    return sum(size for pointer, size in held.items() if pointer not in shared)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes (NaN is NaN, 0 is not -0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = _BITS[a.dtype.itemsize]
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def copied_tensors(root: object) -> dict[str, Tensor]:
    """Return copies of what `held_tensors` finds, to be compared with a later state."""
    return {path: tensor.detach().clone() for path, tensor in held_tensors(root).items()}


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """Return the paths at which two states differ; empty if they do nowhere."""
    paths = [path for path in {**a, **b} if path not in a or path not in b]
    paths += [path for path in a if path in b and not same_bytes(a[path], b[path])]
    return ", ".join(paths)
