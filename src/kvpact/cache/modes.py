"""Calls of caches under modes of torch that a program may have set."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def detached(call: Callable[P, T]) -> Callable[P, T]:
    """Let a call run without gradients, and outside of inference mode.

    What a cache keeps is updated in place later, maybe outside of that mode, where torch refuses
    updates of tensors that were made inside.
    """

    @wraps(call)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **options)
        with torch.no_grad():
            return call(*args, **options)

    return run
