"""Attention of many sequences: one call of the native kernel where it covers them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.plan import Kernel
from kvpact.kernels.torch.attend import attend, check_call
from kvpact.kernels.views import LayerView


class Row(NamedTuple):
    """The arguments of `attend` for one sequence: a batch of one."""

    view: LayerView | None
    k: Tensor | None
    v: Tensor | None
    q: Tensor
    config: AttendConfig
    padding: Tensor | None
    kernel: Kernel | None = None


def attend_rows(rows: Sequence[Row]) -> Tensor:
    """Compute `attend` for sequences of unlike lengths.

    Parameters
    ----------
    rows : sequence of Row
        One or more; their queries have one shape and dtype.

    Returns
    -------
    Tensor
        `[N, H_q, q_len, D_v]`, what `attend` gives for each.
    """
    kernel = rows[0].kernel
    if kernel is None or kernel.library is None or not all(_covered(row, kernel) for row in rows):
        return torch.cat([attend(*row) for row in rows])
    return _natively(kernel, rows)


def _covered(row: Row, kernel: Kernel) -> bool:
    same = row.kernel is kernel
    return same and not native.refusal(row.view, row.k, row.v, row.q, row.config)


def _natively(kernel: Kernel, rows: Sequence[Row]) -> Tensor:
    view, _, v, q, *_ = rows[0]
    _, q_heads, queries, _ = q.shape
    width = native.tokens_of(view and view.v, v).shape[3]
    out = native.new_output(len(rows), q_heads, queries, width)
    place, size = out.data_ptr(), out.stride(0) * out.itemsize
    calls = []
    for view, k, v, q, config, padding, _ in rows:
        check_call(view, k, q, config)
        calls.append(native.native_call(kernel.fast, view, k, v, q, config, padding, place))
        place += size
    native.run(kernel, calls)
    kernel.calls["cpu"] += len(rows)
    return saturated(out, rows[0].q.dtype)
