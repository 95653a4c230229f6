"""`CacheContract`: what a cache has to keep to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvpact.testing.cache_append import AppendChecks, ByteChecks, ExactChecks
from kvpact.testing.cache_attention import AttentionChecks
from kvpact.testing.cache_base import CacheKit, Tokens
from kvpact.testing.cache_changes import ForkChecks, RollbackChecks, RowChecks, SnapshotChecks
from kvpact.testing.cache_input import InputChecks
from kvpact.testing.data import Shape, by_name, integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import difference

T = TypeVar("T")
_STEPS, _NEW = 6, 4
"""Steps of so many tokens: some have room after the exact tokens, others have to make it."""


class Mode(NamedTuple):
    """The settings of torch while a program calls a cache."""

    dtype: torch.dtype = torch.float32
    device: str | None = None  # the default device; None leaves it
    inference: bool = False  # what is called first runs in inference mode

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set that for one call."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with nullcontext() if self.device is None else torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)


class ModeChecks(CacheKit):
    """A cache that is used under such modes: its bytes and its outputs are those without."""

    modes: ClassVar[dict[str, Mode]] = {
        "float64": Mode(torch.float64),
        "float16 on meta": Mode(torch.float16, "meta"),
        "bfloat16": Mode(torch.bfloat16),
        "inference": Mode(inference=True),
    }

    @depends_on("bytes")
    def test_what_a_program_sets_for_torch(self) -> None:
        """A default is for what a program makes itself; models are often loaded under one."""
        windows = [window for _, window in self.exact_tokens()]
        prompt = max(windows) + max(self.units()) + 8
        expected = self._history(Mode(), prompt)
        for name, mode in self.modes.items():
            different = difference(expected, self._history(mode, prompt))
            assert not different, f"{name}: not the same bytes: {different}"

    def _history(self, mode: Mode, prompt: int) -> dict[str, Tensor]:
        """Return the outputs of a small history and what is held at its end, by numbers."""
        found, has = dict[str, Tensor](), self.operations.__contains__
        total = prompt + _STEPS * _NEW
        shape = Shape(1, 2, (total,), 32, 32, torch.float32)
        given = self.tokens(shape, total)

        def run(call: Callable[..., T], *args: Any, **named: Any) -> T:
            with mode.set():
                return call(*args, **named)

        def append(cache: Any, start: int, end: int) -> None:
            part = tuple(x[:, :, start:end] for x in given)
            named = by_name(*part)
            output = run(cache.attend, 0, **named) if has("attend") else run(_shown, cache, part)
            found[f"output {len(found)}"] = output

        with torch.inference_mode(mode.inference):
            cache = run(self.make_cache, shape.geometry())
            append(cache, 0, prompt)
            append(cache, prompt, prompt + _NEW)
        with torch.no_grad():
            for start in range(prompt + _NEW, total, _NEW):
                append(cache, start, start + _NEW)
        caches = [cache]
        if has("fork"):
            caches.append(run(cache.fork))
            append(caches[1], 0, _NEW)
            if has("snapshot"):
                run(caches[1].restore, run(cache.snapshot))
        if has("select"):
            run(cache.select, integers(0))
        for one in caches:
            append(one, 0, 1)
            if has("truncate"):
                run(one.truncate, prompt - 5)
            found[f"shown {len(found)}"] = run(_shown, one, self.tokens(shape, 2, seed=1))
            found |= {f"{len(found)} {path}": x for path, x in self.state(one).items()}
        return found


def _shown(cache: Any, tokens: Tokens) -> Tensor:
    """Store tokens and return all that the result shows, as one row of numbers."""
    result = cache.prefill(0, *tokens, None)
    shown = [x for x in (result.k, result.v, result.logit_bias) if x is not None]
    return torch.cat([x.flatten() for x in shown])


class CacheContract(
    AppendChecks,
    ExactChecks,
    RollbackChecks,
    ForkChecks,
    RowChecks,
    SnapshotChecks,
    ByteChecks,
    AttentionChecks,
    InputChecks,
    ModeChecks,
):
    """Inherit this in a test module; pytest does the rest.

    To test a method inside kvpact's own cache, set `spec`. To test a cache of one's own, override
    `make_cache` (and `exact_tokens` and `groups`, if `spec` doesn't say them).

    Attributes
    ----------
    spec : str
        The spec that `make_cache` makes a cache of.
    operations : tuple of str
        Calls of `EngineCache` besides those of `CompressedKVCache`. Leave out what the cache lacks,
        and the checks that need it are skipped.

    Notes
    -----
    A conforming cache stores the same bytes however tokens are cut into pieces; after a rollback
    is as if the tokens had never come; is independent of its forks; rearranges rows without
    touching them; counts every byte that can be reached from it; attends exactly over what
    `prefill` shows; and after a named error is, byte by byte, as before.
    """
