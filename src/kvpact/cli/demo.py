"""``kvpact demo``: a long text, continued on the exact cache and on compressed ones."""

from __future__ import annotations

import gc
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvpact.cli import options
from kvpact.cli.console import output_console, print_document, progress, say, size_text
from kvpact.cli.inputs import check_positions, continued, open_model
from kvpact.data import book_path
from kvpact.evaluate import Candidate, compressed_cache
from kvpact.integrations.models import first_tokens
from kvpact.kernels import giving_back
from kvpact.spec import DEFAULT_SPEC

CONTINUED = ("none", DEFAULT_SPEC, "trellis:bits=2")
START = "CHAPTER 1\n"
WIDE = 100  # columns in which three panels have room for their titles
CUE = slice(520, 568)  # tokens of the book that are given once more, to go on from


def demo(
    tokens: int = typer.Option(1500, min=CUE.stop, help="Tokens of the book that the caches hold."),
    model: str = options.MODEL,
    new_tokens: int = typer.Option(40, min=1, help="Tokens of each continuation."),
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Let a model recite a book out of the exact cache and two compressed ones, side by side."""
    network, tokenizer = open_model(model, "float32", threads)
    book = book_path().read_text("utf-8")
    book = book[max(book.find(START), 0) :]
    paragraphs = (" ".join(x.split()) for x in book.split("\n\n") if x.strip())
    ids = first_tokens(tokenizer, "\n\n".join(paragraphs), tokens)
    prompt = torch.cat([ids, first_tokens(tokenizer, "\n\n", 9), ids[CUE]])[None]
    check_positions(network, prompt.shape[1], new_tokens, "lower --tokens or --new-tokens")
    made = continuations(network, prompt, new_tokens)
    if as_json:
        names = ("cache", "text", "bytes", "process_bytes")
        rows = [(x.cache, tokenizer.decode(x.tokens), *x[2:]) for x in made]
        print_document("demo", continuations=[dict(zip(names, x, strict=True)) for x in rows])
        return
    from kvpact.integrations.transformers.versions import CACHE

    console = output_console()
    intro = Text(
        f"{len(ids):,} tokens of a book, then a few lines of it once more, and the model goes on "
        "by heart, out of its cache. Red: from the first token on that differs.\n\n… "
        f"{tokenizer.decode(ids[CUE])} …\n"
    )
    console.print(intro)
    panels = [_panel(tokenizer, made[0], x) for x in made]
    grid = Table.grid(expand=True, padding=(0, 1))
    for row in [panels] if console.width >= WIDE else [[panel] for panel in panels]:
        grid.add_row(*row)
    console.print(grid)
    say(f"\ncache = kvpact.CompressedCache(model); model.generate(**inputs, {CACHE}=cache)")


class Continuation(NamedTuple):
    """A cache's spec, the tokens with which it continued a prompt, and the bytes that it held."""

    cache: str
    tokens: list[int]
    bytes: int
    process: int | None  # by which the process grew, as the kernel counts; None where none tells


STATUS = Path("/proc/self/status")


def resident() -> int | None:
    """Return the bytes of this process that lie in memory; None where the system does not say."""
    gc.collect()
    lines = STATUS.read_text("utf-8").splitlines() if STATUS.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return found[0] if found else None


def continuations(model: Any, ids: torch.Tensor, new_tokens: int) -> list[Continuation]:
    """Continue a prompt, int64 ``[1, T]``, greedily on each cache."""
    made = []
    continued(model, ids[:, :64], compressed_cache(model, Candidate(CONTINUED[0])), 2)
    with progress("continuing the book") as report:
        for done, spec in enumerate(CONTINUED, 1):
            with giving_back():  # what the cache before left free must not hide this one's bytes
                cache = compressed_cache(model, Candidate(spec))
            before = resident()
            tokens = continued(model, ids, cache, new_tokens)[0, ids.shape[1] :].tolist()
            after = resident()
            grown = None if before is None or after is None else max(after - before, 0)
            made.append(Continuation(spec, tokens, cache.nbytes, grown))
            del cache
            report(done, len(CONTINUED), spec)
    return made


def _panel(tokenizer: Any, exact: Continuation, own: Continuation) -> Panel:
    """Return a text in a frame, red where it is another one, with the bytes of its cache."""
    pairs = enumerate(zip_longest(exact.tokens, own.tokens))
    split = next((index for index, (left, right) in pairs if left != right), None)
    same = tokenizer.decode(own.tokens[:split])
    body = Text(same.replace("\n", " "))
    body.append(tokenizer.decode(own.tokens)[len(same) :].replace("\n", " "), style="red")
    verdict = "the same text" if split is None else f"differs at token {split + 1}"
    share = f"{verdict}, {100 * own.bytes / exact.bytes:.0f} %"
    if own.process is not None:
        body.append(f"\n\nThe process: +{size_text(own.process)}", style="dim")
    name = "exact cache" if own is exact else own.cache
    title = Text(f"{name}, {size_text(own.bytes)}")  # both lines fit a third of 100 columns
    return Panel(body, title=title, subtitle=None if own is exact else Text(share))
