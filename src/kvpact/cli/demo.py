"""``kvpact demo``: a real model on compressed caches, with what that costs and saves."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from kvpact.cli import options
from kvpact.cli.console import output_console, print_document, progress, show_files, size_text
from kvpact.cli.eval_run import RunPlan, run
from kvpact.cli.inputs import continued
from kvpact.data import book_path
from kvpact.evaluate import Candidate, compressed_cache
from kvpact.evaluate.files import report_data
from kvpact.evaluate.verdict import VERDICTS
from kvpact.spec import DEFAULT_SPEC

CONTINUED = (DEFAULT_SPEC, "trellis:bits=2")
PROMPT_START, PROMPT_TOKENS, NEW_TOKENS = "CHAPTER 1\n", 300, 48
HOW_TO_READ = (
    "How to read it: KL says how far the next-token distribution moves from the exact cache's "
    f"({', '.join(f'up to {most:g} {name}' for name, most in VERDICTS)}, above that broken); "
    "bits/value counts every byte held."
)


def demo(
    out: Path = typer.Option(Path("kvpact-demo"), help="Folder for the output."),
    tokens: int = typer.Option(2048, help="Tokens of the book to evaluate on."),
    chunk: int = typer.Option(256, help="Tokens fed at a time."),
    model: str = options.MODEL,
    new_tokens: int = typer.Option(NEW_TOKENS, min=1, help="Tokens of each continuation."),
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Evaluate eight caches on a book, then let three of them continue it side by side."""
    book = book_path().read_text("utf-8")
    candidates, texts = [Candidate(spec) for spec in options.SPECS], [("Northanger Abbey", book)]
    plan = RunPlan(candidates, texts, tokens, chunk, out=out, tables=not as_json)
    outcome = run(plan, [model], "float32", threads)
    tokenizer = outcome.tokenizer
    start = max(book.find(PROMPT_START), 0)
    ids = tokenizer(book[start:], truncation=True, max_length=PROMPT_TOKENS, return_tensors="pt")
    prompt = ids["input_ids"]
    made = continuations(outcome.model, prompt, new_tokens)
    if as_json:
        told = [
            {"cache": x.name, "text": tokenizer.decode(x.tokens), "bytes": x.bytes} for x in made
        ]
        data = report_data(outcome.results)
        files = [str(path) for path in outcome.files]
        print_document("demo", **data, files=files, continuations=told)
        return
    console = output_console()
    console.print(HOW_TO_READ, style="bold", highlight=False)
    console.print()
    console.print(side_by_side(tokenizer, prompt, made))
    show_files(outcome.files)


class Continuation(NamedTuple):
    """A cache's name, the tokens with which it continued a prompt, and the bytes that it held."""

    name: str
    tokens: list[int]
    bytes: int


def continuations(model: Any, ids: torch.Tensor, new_tokens: int) -> list[Continuation]:
    """Continue a prompt, int64 ``[1, T]``, greedily on the exact and two compressed caches."""
    from transformers import DynamicCache

    made = []
    with progress("continuing the book") as report:
        for index, spec in enumerate(("", *CONTINUED)):
            cache: Any = DynamicCache(config=model.config)
            if spec:
                cache = compressed_cache(model, Candidate(spec))
            tokens = continued(model, ids, cache, new_tokens)[0, ids.shape[1] :].tolist()
            if spec:
                held = cache.memory_usage()
            else:
                held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            made.append(Continuation(spec or "exact cache", tokens, held))
            report(index + 1, 1 + len(CONTINUED), spec)
    return made


def side_by_side(tokenizer: Any, ids: torch.Tensor, texts: list[Continuation]) -> Group:
    """Return continuations of a prompt, the exact cache's first, in panels beside each other."""
    panels = [_panel(tokenizer, x.name, x.bytes, texts[0].tokens, x.tokens) for x in texts]
    tail = _one_line(tokenizer.decode(ids[0, -40:]))
    title = Text(
        f"The book continued greedily after {ids.shape[1]} tokens; red from the first token on "
        f"that differs from the exact cache's.\n… {tail} …",
        style="italic",
    )
    return Group(title, Columns(panels, equal=True, expand=True))


def _one_line(text: str) -> str:
    """Return the text without the book's line breaks, which would make ragged columns."""
    return text.replace("\n", " ")


def first_difference(exact: list[int], other: list[int]) -> int | None:
    """Return the index of the first token that differs, None where all are the same."""
    pairs = enumerate(zip_longest(exact, other))
    return next((index for index, (left, right) in pairs if left != right), None)


def _panel(tokenizer: Any, name: str, held: int, exact: list[int], tokens: list[int]) -> Panel:
    split = first_difference(exact, tokens)
    same = tokenizer.decode(tokens[:split])
    body = Text(_one_line(same))
    body.append(_one_line(tokenizer.decode(tokens)[len(same) :]), style="red")
    if tokens is exact:
        verdict = f"{len(tokens)} tokens"
    elif split is None:
        verdict = f"all {len(tokens)} tokens the same"
    else:
        verdict = f"first differs at token {split + 1}"
    return Panel(body, title=Text(name), subtitle=Text(f"{verdict}, {size_text(held)}"), width=50)
