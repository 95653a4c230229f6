"""OpenVINO's PagedAttention over caches of 8 and 4 bits, which it fills itself."""

from collections.abc import Callable

import numpy as np
import openvino
import torch
from anchors_kept import Case, Maker, Ring
from attend_calls import copies
from openvino import opset13
from openvino.op import _PagedAttentionExtension
from torch import Tensor

CACHES = {"u8": openvino.Type.u8, "u4": openvino.Type.u4}
FLOAT, INT = openvino.Type.f32, openvino.Type.i32
BLOCK, PIECE = 32, 256
"""Tokens of a block of the cache, and of a call that fills it."""


def makers(case: Case) -> dict[str, Maker]:
    """Return a maker of calls for each kind of cache."""
    return {f"OpenVINO {name}": _maker(case, name) for name in CACHES}


def _maker(case: Case, name: str) -> Maker:
    held: list[list[openvino.Tensor]] = []

    def made(threads: int) -> Ring:
        compiled = _compiled(case, name, threads)
        if not held:
            held.extend(_filled(case, compiled))
        return [_call(case, compiled, pair) for pair in held]

    return made


def _compiled(case: Case, name: str, threads: int) -> openvino.CompiledModel:
    """Return a model of one node."""
    heads, _, dim = case.k.shape
    told = {
        "q": (FLOAT, [-1, case.q.shape[0] * dim]),
        "k": (FLOAT, [-1, heads * dim]),
        "v": (FLOAT, [-1, heads * dim]),
        "key_cache.0": (openvino.Type.dynamic, openvino.PartialShape.dynamic(4)),
        "value_cache.0": (openvino.Type.dynamic, openvino.PartialShape.dynamic(4)),
    }
    indices = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    told |= {index: (INT, [-1]) for index in indices}
    given = []
    for named, (kind, shape) in (told | {"max_context_len": (INT, [])}).items():
        given.append(opset13.parameter(shape, kind, named))
        given[-1].get_output_tensor(0).set_names({named})

    def none(kind: type, shape: tuple[int, ...] = (0,)) -> openvino.Node:
        return opset13.constant(np.zeros(shape, kind))

    scale, whole, real = opset13.constant(np.float32(dim**-0.5)), np.int32, np.float32
    inputs = [*given[:9], scale, none(whole, ()), none(real), given[9]]
    inputs += [*(none(whole) for _ in range(3)), none(real)]  # scores, rotation
    inputs += [none(real), none(whole, ()), none(whole, ()), none(real)]  # sparsity, sinks
    inputs += [none(whole, ()), *(none(whole) for _ in range(4))]  # eviction
    inputs += [none(np.uint8), none(whole)]  # bias
    node = _PagedAttentionExtension([x.output(0) for x in inputs])
    for side in "kv":
        node.get_rt_info()[f"num_{side}_heads"] = heads
        node.get_rt_info()[f"{side}_head_size"] = dim
    model = openvino.Model([node.output(0)], given, "attention")
    settings = {
        "KEY_CACHE_PRECISION": CACHES[name],
        "VALUE_CACHE_PRECISION": CACHES[name],
        "INFERENCE_PRECISION_HINT": FLOAT,
        "INFERENCE_NUM_THREADS": threads,
    }
    return openvino.Core().compile_model(model, "CPU", settings)


def _filled(case: Case, model: openvino.CompiledModel) -> list[list[openvino.Tensor]]:
    """Return as many caches as the ring needs, each with K and V of the past."""
    found: list[list[openvino.Tensor]] = []
    sides = [model.input(f"{side}_cache.0") for side in ("key", "value")]
    shapes = [side.partial_shape for side in sides]
    blocks = -(-case.k.shape[1] // BLOCK)
    count = 1
    while len(found) < count:
        pair = []
        for side, shape in zip(sides, shapes, strict=True):
            whole = openvino.Shape([blocks, *(n.get_length() for n in list(shape)[1:])])
            pair.append(openvino.Tensor(side.element_type, whole))
        found.append(pair)
        count = copies(sum(x.byte_size for x in pair), case.ring)
        for start in range(0, case.past, PIECE):
            end = min(start + PIECE, case.past)
            no_queries = torch.zeros(case.q.shape[0], end - start, case.q.shape[2])
            piece = no_queries, case.k[:, start:end], case.v[:, start:end]
            # A sequence of its own: over all before it filling would take as long as a prompt.
            _request(model, pair, start // BLOCK, 0, *piece).infer()
    return found


def _request(
    model: openvino.CompiledModel,
    caches: list[openvino.Tensor],
    first: int,
    past: int,
    *tokens: Tensor,
) -> openvino.InferRequest:
    """Return a request for q, k and v behind a past that begins in block `first`."""
    request, end = model.create_infer_request(), past + tokens[0].shape[1]
    for name, x in zip("qkv", tokens, strict=True):
        rows = x.transpose(0, 1).reshape(x.shape[1], -1).contiguous().numpy()
        request.set_tensor(name, openvino.Tensor(rows))
    for name, x in zip(("key_cache.0", "value_cache.0"), caches, strict=True):
        request.set_tensor(name, x)
    blocks = -(-end // BLOCK)
    indices = {
        "past_lens": [past],
        "subsequence_begins": [0, end - past],
        "block_indices": range(first, first + blocks),
        "block_indices_begins": [0, blocks],
        "max_context_len": end,
    }
    for name, numbers in indices.items():
        request.set_tensor(name, openvino.Tensor(np.array(numbers, np.int32)))
    return request


def _call(
    case: Case, model: openvino.CompiledModel, caches: list[openvino.Tensor]
) -> Callable[[], Tensor]:
    new = (x[:, -case.new :] for x in (case.q, case.k, case.v))
    request = _request(model, caches, 0, case.past, *new)

    def call() -> Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor(0).data).view(case.new, *shape)

    shape = (case.q.shape[0], case.q.shape[2])
    return call
