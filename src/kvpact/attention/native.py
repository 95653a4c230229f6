"""Attention by the native kernel: what it covers, and its arguments.

The torch body in `attend` defines the result. Everything is checked here, before C++ is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.attention import native_rows
from kvpact.attention.views import LayerView, StreamView
from kvpact.contract import AttendConfig
from kvpact.kernels.cpu import structs
from kvpact.kernels.dispatch import Kernel
from kvpact.kernels.ops import saturated
from kvpact.methods import Codec
from kvpact.transforms import IDENTITY
from kvpact.transforms.hadamard import RandomHadamard, random_signs

MOST_DIM, MOST_GROUPS = 1024, 32
_DTYPES = {torch.float32: structs.F32, torch.float16: structs.F16, torch.bfloat16: structs.BF16}
_KINDS = {
    "table": structs.TABLE,
    "linear": structs.LINEAR,
    "raw": structs.RAW,
    "e4m3": structs.E4M3,
    "e5m2": structs.E5M2,
}
_FIELDS = ("codes", "scale", "zero", "fold", "shift")


class _Template:
    """What of a stream's arguments depends on its codec alone; or why there are none."""

    def __init__(self, codec: Codec, dim: int) -> None:
        self.reason = ""
        self.stream = structs.Stream()
        self.names: list[tuple[str, str]] = []
        self._alive: list[Tensor] = []
        form = codec.packed_format()
        if form is None:
            self.reason = f"no native format for {type(codec).__name__}"
            return
        channels = form.channels or dim
        if dim > MOST_DIM:
            self.reason = f"width {dim} is above {MOST_DIM}"
        elif channels < dim and (channels % 32 or -(-dim // channels) > MOST_GROUPS):
            self.reason = f"groups of {channels} channels"
        elif codec.transform is not IDENTITY and not isinstance(codec.transform, RandomHadamard):
            self.reason = f"transform {type(codec.transform).__name__}"
        stream = self.stream
        stream.kind, stream.bits, stream.dim = _KINDS[form.kind], form.bits, dim
        stream.group, stream.channels = form.group, channels
        stream.shift_scaled, stream.middle = form.shift_scaled, form.middle
        if form.kind == "raw":
            number = next(f.dtype for f in codec.fields if f.name == form.codes)
            stream.number = _DTYPES[number]
        levels = list(form.levels) or [0.0]
        if form.kind == "table":
            # At least 16: a vector register of levels is filled up with repetitions.
            levels *= max(16 // len(levels), 1)
        stream.table = self._keep(torch.tensor(levels, dtype=torch.float32))
        if isinstance(codec.transform, RandomHadamard):
            rotation = codec.transform
            signs = random_signs(dim + rotation.block, rotation.seed, torch.device("cpu"))
            stream.signs = self._keep(signs)
        for name in _FIELDS:
            field = getattr(form, name)
            if field is not None:
                self.names.append((name, field))

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()


_templates: WeakKeyDictionary[Codec, _Template] = WeakKeyDictionary()


def _template(view: StreamView) -> _Template:
    found = _templates.get(view.codec)
    if found is None:
        found = _templates[view.codec] = _Template(view.codec, view.tail.shape[3])
    return found


def refusal(view: LayerView, q: Tensor, config: AttendConfig) -> str:
    """Return why the native kernel does not cover a call; nothing if it does.

    Parameters
    ----------
    view : LayerView
        The tokens held.
    q : Tensor
        `[B, H_q, q_len, D]`.
    config : AttendConfig
        How to attend.
    """
    if q.device.type != "cpu" or view.k.tail.device.type != "cpu":
        return f"device {q.device}"
    if q.dtype not in _DTYPES or view.k.tail.dtype not in _DTYPES:
        return f"dtype {q.dtype}"
    return _template(view.k).reason or _template(view.v).reason


def _exact(x: Tensor | None, alive: list[Any]) -> tuple[int, int, int, int]:
    if x is None or x.numel() == 0:
        return (0, 0, 0, 0)
    if x.stride(3) != 1 and x.shape[3] != 1:
        x = x.contiguous()
    alive.append(x)
    size = x.element_size()
    row, head, token, _ = x.stride()
    return (x.data_ptr(), row * size, head * size, token * size)


def _stream(view: StreamView, fresh: Tensor | None, alive: list[Any]) -> structs.Stream | None:
    template = _template(view)
    stream = structs.Stream.from_buffer_copy(template.stream)
    alive.append(template)
    stream.segment_tokens = view.source.segment_tokens
    stream.exact_from = view.exact_from
    stream.dtype = _DTYPES[view.tail.dtype]
    if view.exact_from:
        for name, field in template.names:
            found = view.source.addresses(field)
            if found is None:
                return None
            setattr(stream, name, found)
        alive.append(view.source)
        if view.sinks is not None and view.sink_positions is not None:
            stream.sinks = _exact(view.sinks, alive)
            positions = view.sink_positions.contiguous()
            alive.append(positions)
            stream.sink_positions, stream.n_sinks = positions.data_ptr(), positions.shape[1]
    stream.tail = _exact(view.tail, alive)
    if fresh is not None:
        stream.fresh = _exact(fresh.to(view.tail.dtype), alive)
    return stream


def _mask(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return bytes, or fp32 with -inf for what its dtype's lowest number hides."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8) if mask.stride(-1) == 1 else mask.to(torch.uint8)
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = mask.to(torch.float32).masked_fill(hidden, -torch.inf)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask.expand(shape)


def new_output(*shape: int) -> Tensor:
    """Return memory for fp32 results; every number of it is written."""
    return torch.empty(shape)


def attend_native(
    kernel: Kernel,
    view: LayerView,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None,
    latent: bool = False,
) -> Tensor | None:
    """Compute `attend`, or `attend_latent`, for a call that `refusal` lets pass.

    The parameters are theirs, checked. None where the slots don't lie in memory as the kernel
    needs them.
    """
    batch, q_heads, queries, dim = q.shape
    heads = view.k.tail.shape[1]
    new = 0 if k is None else k.shape[2]
    alive: list[Any] = []
    streams = _stream(view.k, k, alive), _stream(view.v, v, alive)
    if streams[0] is None or streams[1] is None:
        return None
    args = structs.AttendArgs(*streams, batch, heads)
    args.groups, args.queries = q_heads // heads, queries
    args.held, args.fresh = view.length, new
    args.first = view.length + new - queries
    args.q, args.q_row, args.q_head, args.q_token = _exact(q, alive)
    args.q_dtype = _DTYPES[q.dtype]
    out = new_output(batch, q_heads, queries, (view.k if latent else view.v).tail.shape[3])
    args.out = out.data_ptr()
    args.causal, args.window = config.is_causal, config.sliding_window or 0
    args.scale = config.softmax_scale if config.softmax_scale is not None else dim**-0.5
    args.softcap = config.softcap or 0.0
    if padding is not None:
        padding = padding.to("cpu", torch.int64).contiguous()
        args.padding = padding.data_ptr()
    if config.sink_logits is not None:
        sink_logits = config.sink_logits.detach().to("cpu", torch.float32).contiguous()
        alive.append(sink_logits)
        args.sink_logits = sink_logits.data_ptr()
    if config.mask is not None:
        mask = _mask(config.mask.to("cpu"), (batch, q_heads, queries, view.length + new))
        alive.append(mask)
        size = mask.element_size()
        args.mask, args.mask_float = mask.data_ptr(), mask.dtype == torch.float32
        row, head, query, _ = mask.stride()
        args.mask_row, args.mask_head, args.mask_query = row * size, head * size, query * size
    args.fast, args.threads = kernel.fast, torch.get_num_threads()
    status = native_rows.run(kernel, args, latent)
    if status == 3:
        raise MemoryError("no memory for the scratch space of attention")
    assert status == 0, f"the native kernel refused the call ({status})"
    return saturated(out, q.dtype)
