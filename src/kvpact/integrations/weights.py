"""Reading a model's weights in every form and place that they may have.

They may be plain tensors, elsewhere until a module is called (accelerate's offload), parts that
several processes hold (DTensor), of a class of their own (torchao), or nothing that anybody but
the module can read. What can't be read is never guessed.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kvpact.errors import MismatchError

_TEXTS = (str, bytes, int, float, torch.dtype, torch.device, type(None))


def read(module: Any, name: str, around: Sequence[Any] = (), gather: bool = False) -> Tensor | None:
    """Return the numbers of a module's tensor, None where it has none; raises `MismatchError`.

    `around`: modules in which it is, one of which may keep its weights; `gather`: as of `gathers`.
    """
    x = getattr(module, name, module)
    if ismethod(x) and type(module).__module__.startswith("torch.ao."):
        x = x()
    if x is None:
        return None
    with brought(x, module, *around):
        x = getattr(module, name) if _is_away(x) else x
        found = plain(x, gather)
        if found is None and getattr(type(x), "dequantize", None) is not Tensor.dequantize:
            with suppress(Exception):  # a class of others may raise anything
                found = plain(x.detach().dequantize(), gather)
    # Integers and numbers of one byte mean something with scales alone.
    if found is None or not found.is_floating_point() or found.dtype.itemsize < 2:
        raise MismatchError(f"{name!r} of a {type(module).__name__} can't be read")
    return found


def read_if_known(
    module: Any, name: str, around: Sequence[Any] = (), gather: bool = False
) -> Tensor | None:
    """Return the result of `read`, and None where it raises."""
    with suppress(MismatchError):
        return read(module, name, around, gather)
    return None


def _is_away(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


@contextmanager
def brought(x: Any, *modules: Any) -> Iterator[None]:
    """Let accelerate bring the weights of modules, if the tensor `x` of theirs is away."""
    with ExitStack() as stack:
        if _is_away(x) and any(hasattr(module, "_hf_hook") for module in modules):
            from accelerate.utils import align_module_device

            for module in modules:
                stack.enter_context(align_module_device(module))
        yield


def plain(x: Any, gather: bool) -> Tensor | None:
    """Return a plain tensor that has what this process computes with; None if there is none."""
    with suppress(Exception):  # a class of others may raise anything
        flat = isinstance(x, Parameter) and (not x.numel() or hasattr(x, "_fsdp_flattened"))
        if flat:  # a part of what processes share (DeepSpeed's stage 3, FSDP's first version)
            return None
        x = x.detach()
        if _is_shared(x):
            x = _own_part(x, gather)
        if x.is_quantized:
            x = x.dequantize()
        freed = x.numel() and not x.is_meta and not x.untyped_storage().nbytes()
        if type(x) is Tensor and x.layout is torch.strided and not x.is_meta and not freed:
            return x
    return None


def pieces(name: str, x: Any, gather: bool) -> Iterator[tuple[str, Tensor | str]]:
    """Yield plain tensors and texts that are all of an entry of a state; or `MismatchError`."""
    found = plain(x, gather) if isinstance(x, Tensor) else None
    if found is not None:
        yield name, found
    elif isinstance(x, Mapping | tuple | list):
        for key, part in x.items() if isinstance(x, Mapping) else enumerate(x):
            yield from pieces(f"{name}.{key}", part, gather)
    elif isinstance(x, _TEXTS):
        yield name, repr(x)
    elif hasattr(x, "__tensor_flatten__") and not _is_shared(x) and not x.is_meta:
        parts, more = x.__tensor_flatten__()
        if " at 0x" in (text := f"{type(x).__name__} {more}"):  # no two processes say the same
            raise _unreadable(name, x)
        yield name, text
        for part in parts:
            yield from pieces(f"{name}.{part}", getattr(x, part), gather)
    else:
        raise _unreadable(name, x)


def _unreadable(name: str, x: Any) -> MismatchError:
    place = "on no device" if _is_away(x) else f"a {type(x).__name__}"
    return MismatchError(
        f"the weights {name!r} can't be read ({place}), so the model has no fingerprint; give "
        "prefix_cache one of your own, fingerprint=, that no other weights have"
    )


def _is_shared(x: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(x, known.DTensor)


def gathers(model: Any) -> bool:
    """Return whether a model puts parts of its tensors together before it computes (FSDP2)."""
    known = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return known is not None and any(isinstance(x, known) for x in model.modules())


def _splits(mesh: Any, gather: bool) -> list[bool]:
    """Return for each dimension of a mesh whether processes compute with parts (heads) alone."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return [not gather or "tp" in name or "tensor" in name for name in names]


def _own_part(x: Any, gather: bool) -> Any:
    if gather:  # all processes of the mesh have to come here
        from torch.distributed.tensor import Replicate

        kept = zip(x.placements, _splits(x.device_mesh, gather), strict=True)
        x = x.redistribute(placements=[p if split else Replicate() for p, split in kept])
    return x.to_local()


def part_of(model: Any) -> str:
    """Return which part of the heads this process has, as ``" part 1 of 2"``; "" if all."""
    gather = gathers(model)
    for x in model.parameters():
        if _is_shared(x):
            mesh, splits = x.device_mesh, _splits(x.device_mesh, gather)
            dims = [i for i, p in enumerate(x.placements) if splits[i] and p.is_shard()]
            ranks = [(mesh.get_local_rank(i), mesh.size(i)) for i in dims]
            if ranks:
                return " part " + ", ".join(f"{rank} of {size}" for rank, size in ranks)
    if (getattr(model, "tp_size", None) or 1) > 1:  # releases whose parts are plain tensors
        return f" part {torch.distributed.get_rank() % model.tp_size} of {model.tp_size}"
    return ""


def mark(x: Any) -> object:
    """Return a mark that changes when a tensor is replaced or visibly written to."""
    if not isinstance(x, Tensor) or x.is_meta:
        return type(x)  # a new one at every call
    if type(x) is Parameter:  # others may lie nowhere
        return id(x), x.data_ptr(), x.is_inference() or x._version
    with suppress(Exception):  # a class of others may raise anything
        return id(x), x.is_inference() or x._version
    return id(x)


def input_device(model: Any) -> torch.device:
    """Return where a model takes its input, which accelerate knows where weights are offloaded."""
    device: torch.device = getattr(model, "device", torch.device("cpu"))  # a config has none
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((x for x in places if x is not None), "cpu"))


def modules_to(model: Module, name: str) -> list[Module]:
    """Return the module that has a parameter or buffer of this name, and those around it."""
    parts = name.split(".")[:-1]
    found: list[Module] = [model]
    for part in parts:
        if not isinstance(child := getattr(found[-1], part, None), Module):
            break
        found.append(child)
    return found[::-1]
