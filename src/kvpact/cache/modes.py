"""Calls of caches under modes of torch that a program may have set."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def detached(call: Callable[P, T]) -> Callable[P, T]:
    """Run a call without gradients and outside inference mode: what it keeps is updated later."""

    @wraps(call)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **options)
        with torch.no_grad():
            return call(*args, **options)

    return run
