"""Counts what a GPU would be given to do."""

from collections import Counter
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

_NOTHING = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Names, in order, launches of Triton's kernels and operations of torch that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._kept: list[tuple[Any, Any]] = []

    @property
    def counts(self) -> Counter[str]:
        """How often what was launched."""
        return Counter(self.names)

    def __enter__(self) -> "Launches":
        for kind in (triton.JITFunction, InterpretedFunction):
            self._kept.append((kind, kind.run))
            kind.run = self._counting(kind.run)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for kind, run in self._kept:
            kind.run = run

    def _counting(self, run: Any) -> Any:
        def counted(kernel: Any, *given: Any, **named: Any) -> Any:
            self.names.append(kernel.fn.__name__)
            with _disable_current_modes():
                return run(kernel, *given, **named)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        returns = func._schema.returns
        view = bool(returns) and returns[0].alias_info is not None and not func._schema.is_mutable
        if not view and name not in _NOTHING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
