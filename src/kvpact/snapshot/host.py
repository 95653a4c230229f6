"""Tensors on the CPU, wherever they lie."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    cuda: Any = torch.cuda  # its streams have no types
    stream: torch.cuda.Stream = cuda.Stream(device)
    return stream


def on_host(x: Tensor) -> Tensor:
    """Return a tensor on the CPU: itself, or a copy that is complete.

    A CUDA device writes page-locked memory by itself, several times as fast as other memory, which
    the driver copies once more, piece by piece. The copy has a stream of its own and waits for what
    the current one has queued so far: what other threads queue in the meantime, such as the next
    step of a model, neither delays it nor waits for it.

    `x`: any; strides may have gaps. The result has no gradients. A copy from a CUDA device
    is page-locked: keep what is made of it, not the copy itself.
    """
    x = x.detach()
    if x.device.type != "cuda":
        return x.cpu()
    stream = _beside(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        copy = x.new_empty(x.shape, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    # The caller reads the copy on the CPU, and may free x.
    stream.synchronize()
    return copy
