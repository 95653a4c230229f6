"""``kvpact store``: the entries and bytes of a store, and its cleaning."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import (
    literal,
    note,
    output_console,
    print_document,
    print_table,
    printable,
    progress,
    size_text,
)
from kvpact.errors import StoreUnavailable
from kvpact.stores import Store, StoreWarning, open_store

_URL = typer.Argument(
    ...,
    metavar="STORE",
    help="A directory, redis://…, rediss://…, mooncake://… or a URL of fsspec.",
)
_REMOVED = ("expired", "evicted", "damaged", "leftovers")


@contextmanager
def opened(
    url: str, password: str | None, *, create: bool = False, **given: Any
) -> Iterator[Store]:
    """Open a store, which has to be there unless `create`; warnings become notes on stderr."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if not create and ("://" not in url or url.startswith("file://")):
        chosen["create"] = False
    if password is not None and url.startswith(("redis://", "rediss://", "unix://")):
        chosen["password"] = password
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StoreWarning)
        try:
            with open_store(url, **chosen) as held:
                yield held
        except StoreUnavailable:
            caught.clear()  # the error names what the warnings were of
            raise
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                note(text)


def list_keys(
    url: str = _URL, password: str | None = options.PASSWORD, as_json: bool = options.JSON
) -> None:
    """Print every key, one per line."""
    with opened(url, password) as held:
        keys = sorted(held.keys())
    if as_json:
        print_document("store ls", store=repr(held), keys=keys)
        return
    for key in keys:
        typer.echo(printable(key))


def stats(
    url: str = _URL, password: str | None = options.PASSWORD, as_json: bool = options.JSON
) -> None:
    """Print the number of entries and their bytes."""
    with opened(url, password) as held:
        found = held.stats()
        if found.entries is None or found.bytes is None:
            list(held.keys())  # raises with the reason
            raise StoreUnavailable(f"{held!r} can't be reached")
    if as_json:
        print_document("store stats", store=repr(held), entries=found.entries, bytes=found.bytes)
        return
    mean = size_text(found.bytes / found.entries) if found.entries else "-"
    row = (literal(repr(held)), str(found.entries), size_text(found.bytes), mean)
    print_table(("store", "entries", "bytes", "mean"), [row])


def gc(
    url: str = _URL,
    password: str | None = options.PASSWORD,
    verify: bool = typer.Option(False, help="Read all entries, and remove damaged ones."),
    max_bytes: int | None = options.optional(
        "Drop the least recently used entries, down to this size."
    ),
    ttl: float | None = options.optional("Drop entries older than this many seconds."),
    as_json: bool = options.JSON,
) -> None:
    """Remove expired and surplus entries, leftovers and, with --verify, damaged entries."""
    with opened(url, password, max_bytes=max_bytes, ttl=ttl) as held, progress("reading") as show:
        report = held.gc(verify=verify, progress=show)
    removed = {name: getattr(report, name) for name in _REMOVED}
    if as_json:
        document = {"removed": removed, "freed_bytes": report.freed}
        print_document("store gc", store=repr(held), **document)
        return
    print_table(("removed", "entries"), ((name, str(count)) for name, count in removed.items()))
    output_console().print(f"{size_text(report.freed)} freed", highlight=False)
