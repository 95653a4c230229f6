"""What tests of the fast kernels share: calls of a cache, their parts, and what these should be."""

import itertools
from typing import Any

import torch
from one_layer import fill, normal
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.torch.latent import tokens
from kvpact.kernels.torch.logits import LogitRules
from kvpact.kernels.triton.attend.rows import rows_of
from kvpact.kernels.triton.digits.fast import (
    Fast,
    attend_fast,
    digits_reason,
    fast_range,
    launch_of,
)
from kvpact.kernels.triton.digits.tables import whole_slots
from kvpact.kernels.triton.forms import slots_of

CPU = torch.device("cpu")


def decode_calls(
    monkeypatch: Any,
    spec: str,
    tokens: int = 330,
    shape: tuple[int, int, int, int, int] = (1, 2, 2, 1, 128),
    config: AttendConfig | None = None,
    padding: Tensor | None = None,
    page: int | None = None,
) -> list[AttendCall]:
    """Return the calls of a step after so many tokens; shape: B, H_kv, groups, q_len, D."""
    batch, heads, groups, queries, dim = shape
    k, v = (normal(batch, heads, tokens + queries, dim, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {"backend": "torch"}
    if page is not None:
        options |= {"layout": "paged", "page_size": page}
        options["num_pages"] = batch * (-(-tokens // page) + 2)
    first = AttendConfig(padding=padding) if padding is not None else None
    cache = fill(spec, k[:, :, :tokens], v[:, :, :tokens], first, **options)
    made: list[AttendCall] = []
    attend = TORCH.attend

    def seen(calls):
        made.extend(calls)
        return attend(calls)

    monkeypatch.setattr(TORCH, "attend", seen)
    q = normal(batch, heads * groups, queries, dim, seed=3)
    cache.attend(0, k=k[:, :, tokens:], v=v[:, :, tokens:], q=q, config=config or AttendConfig())
    return made


def merged_parts(calls: list[AttendCall], parts: int = 3, kw: int = 4) -> Tensor:
    """Return what the fast kernels make of the calls' packed tokens, `[B, H_kv, rows, D_v]`."""
    call = calls[0]
    k, v = (slots_of(side.codec, CPU) for side in call.view[:2])
    scale = call.config.softmax_scale or call.q.shape[3] ** -0.5
    q = torch.cat([each.q for each in calls])
    heads = call.kv_heads
    rows = q.shape[1] // heads * q.shape[2]
    assert digits_reason(k, v, rows) == ""
    firsts = list(itertools.accumulate((each.q.shape[0] for each in calls), initial=0))
    skipped = [fast_range(each) for each in calls]
    table = rows_of(calls, (k, v), (q.dtype, q.dtype), CPU, firsts[:-1], skipped)
    size = call.view.k.source.segment_tokens
    chosen, inside = launch_of(k.form, v.form, rows, {size})
    fast = Fast(whole_slots(k), whole_slots(v), chosen, inside, parts, kw)
    # One part more in front, which stays as it is.
    packed = torch.full((len(q), heads, parts + 1, rows, v.form.dim), torch.nan)
    lse = torch.full((len(q), heads, parts + 1, rows), torch.nan)
    attend_fast(fast, calls, scale, table.table, packed, lse, 1)
    assert packed[:, :, 0].isnan().all() and lse[:, :, 0].isnan().all()
    weights = torch.softmax(lse[:, :, 1:] * 0.6931471805599453, 2).nan_to_num(0.0)
    return (weights.unsqueeze(-1) * packed[:, :, 1:]).sum(2)


def _expected(call: AttendCall) -> Tensor:
    begin, end = fast_range(call)
    batch, q_heads, queries, dim = call.q.shape
    heads, view = call.kv_heads, call.view
    groups = q_heads // heads
    scale = call.config.softmax_scale or dim**-0.5
    rows = (call.q.float() * scale).reshape(batch, heads, groups * queries, dim)
    rows = view.k.codec.transform.forward(rows)
    k, v = tokens(view.k, 0, end)[0], tokens(view.v, 0, end)[0]
    first = call.held + call.new - queries
    rules = LogitRules(call.config, call.padding, first, queries, heads, groups)
    logits = rules.apply(rows @ k.mT, 0)
    at = torch.arange(end).expand(batch, end)
    logits = logits.masked_fill(
        (at < torch.as_tensor(begin).view(-1, 1))[:, None, None], -torch.inf
    )
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v


def error(calls: list[AttendCall], **options: Any) -> float:
    """Return the error over the norm of the output; infinite where a number is not finite."""
    found, expected = merged_parts(calls, **options), torch.cat([_expected(call) for call in calls])
    assert expected.norm() > 0
    worst = ((found - expected).norm() / expected.norm()).item()
    return worst if found.isfinite().all() else float("inf")
