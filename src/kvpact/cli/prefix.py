"""The prompt's prefix in a store, for one generation on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpact.calibration import Calibration
from kvpact.cli.console import note
from kvpact.cli.store import opened
from kvpact.errors import StoreError


class Prefix:
    """Loads the longest known prefix, saves what is new, and keeps the figures.

    Parameters
    ----------
    prefixes : PrefixCache or None
        None does nothing.
    rows : list of (str, str)
        Names and figures for the table of `generate`; more come with each call.
    """

    def __init__(self, prefixes: Any, *rows: tuple[str, str]) -> None:
        self._prefixes, self.rows, self.loaded = prefixes, list(rows), 0
        self._saved = 0

    @property
    def figures(self) -> dict[str, int] | None:
        """Tokens that came out of the store and went into it; None without a store."""
        if self._prefixes is None:
            return None
        return {"loaded_tokens": self.loaded, "saved_tokens": self._saved}

    def load(self, ids: torch.Tensor) -> None:
        """Put the prefix of a prompt `[1, T]` into the cache, all but the last token at most."""
        if self._prefixes is not None:
            begin = time.perf_counter()
            self.loaded = self._prefixes.load(ids[:, :-1])
            self.rows.append(("  loading the prefix", f"{time.perf_counter() - begin:.2f}"))
            self.rows.append(("prompt tokens from the store", str(self.loaded)))

    def save(self, ids: torch.Tensor) -> None:
        """Save the chunks of the whole text, `[1, T]`, that the store does not have."""
        if self._prefixes is not None:
            written = 0
            try:
                written = self._prefixes.save(ids)
            except StoreError as error:  # the text is there; only the next run is slower
                note(f"the prefix was not saved: {error}")
            self._saved = written * self._prefixes.chunk
            self.rows.append(("tokens saved to the store", str(self._saved)))


@contextmanager
def prefix_of(
    url: str | None,
    model: Any,
    cache: Any,
    tenant: str | None,
    password: str | None,
    storage: str | None = None,
    calibration: Calibration | None = None,
) -> Iterator[Prefix]:
    """Open a store, which is made if need be, for the prefixes of a model; None: there is none."""
    if url is None:
        yield Prefix(None)
        return
    from kvpact.integrations.fingerprint import model_fingerprint
    from kvpact.integrations.transformers import prefix_cache

    with opened(url, password, create=True) as store:
        begin = time.perf_counter()
        fingerprint = model_fingerprint(model)
        row = ("  fingerprint of the model", f"{time.perf_counter() - begin:.2f}")
        prefixes = prefix_cache(
            store,
            model,
            cache,
            fingerprint=fingerprint,
            tenant=tenant,
            storage=storage,
            calibration=calibration if storage else None,
        )
        yield Prefix(prefixes, row)
