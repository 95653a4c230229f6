"""The queries of a launch, prepared in one pass (two over latents)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton.attend.general import Variant
from kvpact.kernels.triton.attend.streams import prepare_queries
from kvpact.kernels.triton.trellis.queries import packed_queries
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TreatedKeys
from kvpact.transforms import RandomHadamard

ROWS = 4  # rows of a program


def signs_of(codec: Codec | None, device: torch.device) -> Tensor | None:
    """Return the signs of a codec's transform; None where nothing is transformed."""
    transform = None if codec is None else codec.transform
    if not isinstance(transform, RandomHadamard):
        return None
    return transform.signs(device)


class QueryForm(NamedTuple):
    """The queries of a launch, fp32 without gaps; rounded to tf32 unless `Stream.thrice`."""

    packed: Tensor  # `[B, H_kv, G * q_len, D]`, scaled, for packed tokens
    exact: Tensor  # and for exact ones
    first: Tensor  # `[B, H_kv, G * q_len]`, products with a first key that is a base


def query_rows(calls: Sequence[AttendCall], scale: float, variant: Variant) -> QueryForm:
    """Return the scaled queries for packed tokens and for exact ones, of calls of one kind."""
    call = calls[0]
    q = call.q if len(calls) == 1 else torch.cat([each.q for each in calls])
    if q.stride(3) != 1:
        q = q.contiguous()
    batch, heads = q.shape[0], call.kv_heads
    queries, groups = q.shape[2], q.shape[1] // heads
    for_exact = q.new_empty(batch, heads, groups * queries, q.shape[3], dtype=torch.float32)
    codecs = (None, None) if call.view is None else (call.view.k.codec, call.view.v.codec)
    streams = ((variant.k, 0), (variant.v, variant.k.dim)) if call.latent else ((variant.k, 0),)
    signs = [signs_of(codec, q.device) for codec, _ in zip(codecs, streams, strict=False)]
    for_packed = for_exact
    if any(one is not None for one in signs):
        for_packed = torch.empty_like(for_exact)
    for (stream, first), its_signs in zip(streams, signs, strict=True):
        prepare_queries[-(-groups * queries // ROWS), heads, batch](
            q[..., first:], for_exact if its_signs is None else its_signs,
            for_packed[..., first:], for_exact[..., first:],
            q.stride(0), q.stride(1), q.stride(2), queries, groups, heads, scale,
            stream.dim, stream.width, q.shape[3], its_signs is not None,
            for_packed is not for_exact, not stream.thrice, ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if treated(call):
        return _treated(calls, for_exact, variant)
    return QueryForm(for_packed, for_exact, for_exact)


def treated(call: AttendCall) -> bool:
    """Return whether a call's packed keys are treated in a way of their own."""
    return call.view is not None and isinstance(call.view.k.codec, TreatedKeys)


def _treated(calls: Sequence[AttendCall], rows: Tensor, variant: Variant) -> QueryForm:
    """Return queries for packed keys that each call's codec treats as it has learnt to."""
    parts: list[tuple[Tensor, Tensor]] = []
    done = 0
    for codec, some in groupby(calls, lambda call: call.view and call.view.k.codec):
        assert codec is not None
        count = sum(call.q.shape[0] for call in some)
        packed, first = packed_queries(codec, rows[done : done + count])
        parts.append((packed, rows.new_zeros(packed.shape[:3]) if first is None else first))
        done += count
    packed, first = (
        torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True)
    )
    if not variant.k.thrice:
        packed = ((packed.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return QueryForm(packed.contiguous(), rows, first.contiguous())
