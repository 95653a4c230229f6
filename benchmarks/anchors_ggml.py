"""The attention of llama.cpp, ggml's FLASH_ATTN_EXT, over caches in f16, q8_0 and q4_0."""

import ctypes
from collections.abc import Callable
from typing import Any

import ggml
import torch
from anchors_kept import Case, Maker, Ring
from attend_calls import copies
from torch import Tensor

TYPES = {"f16": ggml.GGML_TYPE_F16, "q8_0": ggml.GGML_TYPE_Q8_0, "q4_0": ggml.GGML_TYPE_Q4_0}
ROOM = 2**20
"""Bytes for the heads of tensors and graphs."""


def makers(case: Case) -> dict[str, Maker]:
    """Return a maker of calls for each type of cache."""
    ggml.ggml_cpu_init()
    return {f"llama.cpp {name}": _maker(case, kind) for name, kind in TYPES.items()}


def _maker(case: Case, kind: int) -> Maker:
    heads, tokens, dim = case.k.shape
    size = heads * tokens * ggml.ggml_row_size(kind, dim)
    count = copies(2 * size, case.ring)
    mask = torch.where(case.mask(), 0.0, -torch.inf).half()
    most = count * 2 * size + mask.nbytes + (count + 1) * (2 * case.q.nbytes + ROOM)
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=most, mem_buffer=None, no_alloc=False))
    q = _tensor(context, ggml.GGML_TYPE_F32, case.q)
    seen = _tensor(context, ggml.GGML_TYPE_F16, mask[None]) if case.new > 1 else None
    held = [[_tensor(context, kind, x) for x in (case.k, case.v)] for _ in range(count)]
    outs = [ggml.ggml_flash_attn_ext(context, q, *pair, seen, dim**-0.5, 0.0, 0.0) for pair in held]
    graphs = [ggml.ggml_new_graph_custom(context, 8, False) for _ in outs]
    for graph, out in zip(graphs, outs, strict=True):
        ggml.ggml_build_forward_expand(graph, out)

    def made(threads: int) -> Ring:
        return [
            _call(graph, out, case.q.transpose(0, 1).shape, threads)
            for graph, out in zip(graphs, outs, strict=True)
        ]

    return made


def _tensor(context: Any, kind: int, x: Tensor) -> Any:
    """Return `[heads, rows, width]` as a tensor of a type."""
    tensor = ggml.ggml_new_tensor_3d(context, kind, *reversed(x.shape))
    place, rows = ggml.ggml_get_data(tensor), x.contiguous()
    if kind in (ggml.GGML_TYPE_Q8_0, ggml.GGML_TYPE_Q4_0):
        given = ctypes.cast(rows.data_ptr(), ctypes.POINTER(ctypes.c_float))
        count = x.shape[0] * x.shape[1]
        ggml.ggml_quantize_chunk(kind, given, place, 0, count, x.shape[2], None)
    else:
        rows = rows.half() if kind == ggml.GGML_TYPE_F16 else rows
        ctypes.memmove(place, rows.data_ptr(), rows.nbytes)
    return tensor


def _call(graph: Any, out: Any, shape: torch.Size, threads: int) -> Callable[[], Tensor]:
    plan = ggml.ggml_graph_plan(graph, threads, None)
    work = torch.empty(plan.work_size + 1, dtype=torch.uint8)
    plan.work_data = ctypes.cast(work.data_ptr(), type(plan.work_data))
    place = (ctypes.c_float * shape.numel()).from_address(ggml.ggml_get_data(out))
    found = torch.frombuffer(place, dtype=torch.float32).view(shape)

    def call() -> Tensor:
        if ggml.ggml_graph_compute(graph, ctypes.byref(plan)):
            raise RuntimeError("ggml computed nothing")
        return found

    call.work = work  # the plan has its address alone
    return call
