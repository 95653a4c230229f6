"""The prompt's prefix in a store, for one generation on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpact.cli.console import note
from kvpact.cli.store import opened
from kvpact.errors import StoreError


class Prefix:
    """Loads the longest known prefix, saves what is new, and keeps the figures.

    Parameters
    ----------
    prefixes : PrefixCache or None
        None does nothing.
    started : float
        When the model was there (`time.perf_counter`).
    fingerprint : float
        Seconds that the model's fingerprint took.
    """

    def __init__(self, prefixes: Any, started: float, fingerprint: float) -> None:
        self._prefixes, self._started, self._fingerprint = prefixes, started, fingerprint
        self.loaded = self._written = 0
        self._seconds = 0.0

    def load(self, ids: torch.Tensor) -> None:
        """Put the prefix of a prompt `[1, T]` into the cache, all but the last token at most."""
        if self._prefixes is not None:
            begin = time.perf_counter()
            self.loaded = self._prefixes.load(ids[:, :-1])
            self._seconds = time.perf_counter() - begin

    def save(self, ids: torch.Tensor) -> None:
        """Save the chunks of the whole text, `[1, T]`, that the store does not have."""
        if self._prefixes is not None:
            try:
                self._written = self._prefixes.save(ids)
            except StoreError as error:  # the text is there; only the next run is slower
                note(f"the prefix was not saved: {error}")

    def rows(self, first_token: float) -> list[tuple[str, str]]:
        """Return names and figures for the table of `generate`; the first token's time given."""
        rows = [
            ("first token, seconds with the model loaded", f"{first_token - self._started:.2f}")
        ]
        if self._prefixes is not None:
            rows += [
                ("  fingerprint of the model", f"{self._fingerprint:.2f}"),
                ("  loading the prefix", f"{self._seconds:.2f}"),
                ("prompt tokens from the store", str(self.loaded)),
                ("tokens saved to the store", str(self._written * self._prefixes.chunk)),
            ]
        return rows


@contextmanager
def prefix_of(
    url: str | None, model: Any, cache: Any, tenant: str | None, password: str | None
) -> Iterator[Prefix]:
    """Open a store, which is made if need be, for the prefixes of a model; None: there is none."""
    started = time.perf_counter()
    if url is None:
        yield Prefix(None, started, 0.0)
        return
    from kvpact.integrations.fingerprint import model_fingerprint
    from kvpact.integrations.transformers import prefix_cache

    with opened(url, password, create=True) as store:
        begin = time.perf_counter()
        fingerprint = model_fingerprint(model)
        seconds = time.perf_counter() - begin
        prefixes = prefix_cache(store, model, cache, fingerprint=fingerprint, tenant=tenant)
        yield Prefix(prefixes, started, seconds)
