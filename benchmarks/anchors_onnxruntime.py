"""ONNX Runtime's GroupQueryAttention over fp32, int8 and int4 caches with a scale per channel."""

from collections.abc import Callable

import numpy as np
import onnxruntime
import torch
from anchors_kept import Case, Maker, Ring, ring_of
from onnx import TensorProto, helper
from torch import Tensor

CACHES = {"fp32": 32, "int8": 8, "int4": 4}
TYPES = {
    torch.float32: (np.float32, TensorProto.FLOAT),
    torch.int8: (np.int8, TensorProto.INT8),
    torch.uint8: (np.uint8, TensorProto.UINT8),
    torch.int32: (np.int32, TensorProto.INT32),
}


def makers(case: Case) -> dict[str, Maker]:
    """Return a maker of calls for each kind of cache."""
    return {f"ONNX Runtime {name}": _maker(case, bits) for name, bits in CACHES.items()}


def quantised(x: Tensor, bits: int) -> tuple[Tensor, list[Tensor]]:
    """Return codes and scales `[1, heads, 1, width]` of K or V, by its largest magnitudes."""
    if bits == 32:
        return x[None].clone(), []
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(1, keepdim=True) / most
    codes = (x / scale).round().clamp(-most - 1, most)[None]
    if bits == 8:
        return codes.to(torch.int8), [scale[None].contiguous()]
    pairs = (codes + 8).to(torch.uint8)
    return pairs[..., ::2] | pairs[..., 1::2] << 4, [scale[None].contiguous()]


def _maker(case: Case, bits: int) -> Maker:
    (k, k_scale), (v, v_scale) = (quantised(x, bits) for x in (case.k, case.v))
    held = ring_of(case, k, v)
    rows = [x.transpose(0, 1).reshape(1, case.new, -1) for x in _new(case)]
    total = torch.tensor(case.k.shape[1], dtype=torch.int32)
    inputs = dict(zip("qkv", rows, strict=True))
    sizes = {"seqlens": total[None] - 1, "total": total}
    scales = dict(zip(("k_scale", "v_scale"), k_scale + v_scale, strict=False))

    def made(threads: int) -> Ring:
        first = inputs | {"past_k": k, "past_v": v} | sizes | scales
        session = _session(case, bits, threads, first)
        given, width = inputs | sizes | scales, case.k.shape[2]
        return [_call(session, given, *pair, width) for pair in held]

    return made


def _new(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.q, case.k[:, case.past :], case.v[:, case.past :]


def _session(
    case: Case, bits: int, threads: int, inputs: dict[str, Tensor]
) -> onnxruntime.InferenceSession:
    """Return a session of a graph of one node."""
    options = {"num_heads": case.q.shape[0], "kv_num_heads": case.k.shape[0]}
    names = ["q", "k", "v", "past_k", "past_v", "seqlens", "total"]
    if bits < 32:  # rotation, positions, bias and sinks are left out
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        options |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        options |= {"kv_cache_bit_width": bits}
    outputs = {"out": inputs["q"], "now_k": inputs["past_k"], "now_v": inputs["past_v"]}
    node = helper.make_node(
        "GroupQueryAttention", names, list(outputs), domain="com.microsoft", **options
    )
    given, found = (
        [helper.make_tensor_value_info(n, TYPES[x.dtype][1], x.shape) for n, x in told.items()]
        for told in (inputs, outputs)
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", given, found)
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    # As all others here: threads that spin take the cores of who comes next.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def _call(
    session: onnxruntime.InferenceSession,
    inputs: dict[str, Tensor],
    k: Tensor,
    v: Tensor,
    width: int,
) -> Callable[[], Tensor]:
    """Return a call over K and V, which are past and present in one buffer."""
    binding, out = session.io_binding(), torch.empty_like(inputs["q"])
    for name, x in (inputs | {"past_k": k, "past_v": v}).items():
        binding.bind_input(name, "cpu", 0, TYPES[x.dtype][0], list(x.shape), x.data_ptr())
    for name, x in {"out": out, "now_k": k, "now_v": v}.items():
        binding.bind_output(name, "cpu", 0, TYPES[x.dtype][0], list(x.shape), x.data_ptr())

    def call() -> Tensor:
        session.run_with_iobinding(binding)
        return rows

    rows = out.view(out.shape[1], -1, width)
    return call
