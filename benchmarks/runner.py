"""What all benchmarks share: options, rounds in which candidates take turns, tables and reports."""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from machine import about, head

Row = dict[str, Any]
Call = Callable[[], object]
Options = argparse.Namespace
Turn = Callable[[], float]
T = TypeVar("T")

BENCH = Path("build/bench")
HELP = {
    "rounds": "in which all candidates take turns",
    "threads": "of torch, and so of the kernels",
    "tokens": "of the prompt or the context",
    "model": "name or folder",
    "spec": "of kvpact's cache",
    "ring": "megabytes of each candidate's ring of caches",
    "out": "folder for the report, as Markdown and JSON",
    "json": "print JSON instead of tables",
}


def arguments(doc: str, *places: str, **defaults: Any) -> argparse.Namespace:
    """Return the options, one for each default and of its type; those in `places` have no dashes.

    A list takes several values, a dictionary any of its keys and all if nothing is said; a class
    stands for no default. What is known of the machine comes along as `about`.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    for name, default in {"out": Path, "json": False, **defaults}.items():
        given: dict[str, Any] = {"help": HELP.get(name), "default": default}
        if isinstance(default, dict):
            given |= {"choices": default, "nargs": "*", "default": list(default), "metavar": "NAME"}
        elif isinstance(default, list):
            kind = default[0] if isinstance(default[0], type) else type(default[0])
            given |= {"nargs": "*", "type": kind, "default": [x for x in default if x is not kind]}
        elif isinstance(default, bool):
            given["action"] = "store_true"
        elif isinstance(default, type):
            given |= {"type": default, "default": None}
        else:
            given["type"] = Path if isinstance(default, Path) else type(default)
        if name in places and "nargs" not in given and not isinstance(default, type):
            given["nargs"] = "?"
        parser.add_argument(name if name in places else f"--{name.replace('_', '-')}", **given)
    return parser.parse_args(namespace=argparse.Namespace(about=about()))


def report(
    options: argparse.Namespace, name: str, rows: Any, body: str | Iterable[str],
    told: Sequence[str] = (), last: bool = True, title: str = "", **more: object,
) -> None:  # fmt: skip
    """Print a report, and write FOLDER/NAME.json and .md where --out names a folder.

    At its head stand the machine, the options in `told`, and `more`. `rows` are a list, or what the
    file has beside the head. Where it is not the `last` one of a run, it is only written.
    """
    found = options.about | {key: getattr(options, key) for key in told} | more
    lines = [body] if isinstance(body, str) else body
    text = "\n".join([*([f"# {title}", ""] if title else []), head(found), "", *lines, ""])
    held = rows if isinstance(rows, dict) else {"rows": rows}
    data = json.dumps({"about": found, **held}, indent=1, default=str)
    if last:
        print(data if options.json else text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(data + "\n", "utf-8")
        (options.out / f"{name}.md").write_text(text, "utf-8")


def table(columns: str | Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are text and the others numbers."""
    names = columns.split(" | ") if isinstance(columns, str) else list(columns)
    ruler = ["---"] * left + ["--:"] * (len(names) - left)
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, ruler, *cells))


def turn_of(*ring: Call, clock: Turn = time.perf_counter, warm: int = 0, best_of: int = 1) -> Turn:
    """Return a function that makes up to 12 calls, the next of the ring, and returns seconds.

    Before them it makes `warm` more: what ran before has emptied the processor's caches, and to
    microseconds that is much. `best_of` is how often all of this is done for the least of times.
    """
    place, todo = itertools.cycle(ring), min(len(ring), 12)

    def turn() -> float:
        for call in itertools.islice(place, warm):
            call()
        start = clock()
        for call in itertools.islice(place, todo):
            call()
        return (clock() - start) / todo

    return turn if best_of == 1 else lambda: min(turn() for _ in range(best_of))


def in_turns(
    turns: Mapping[str, Callable[[], T]], rounds: int, warm: int = 1, back: bool = False,
    rare: Callable[[dict[str, list[T]]], Collection[str]] = lambda _: (),
) -> dict[str, list[T]]:  # fmt: skip
    """Return what each candidate returns, once a round, all taking turns; first come `warm` rounds.

    A noisy machine is noisy for all of them then. With `back` every second round goes backwards;
    those that are `rare`, by what warmed up, take part in every fifth round.
    """
    found: dict[str, list[T]] = {name: [] for name in turns}
    seldom: Collection[str] = ()
    for index in range(-warm, rounds):
        if index == 0:
            seldom, found = rare(found), {name: [] for name in turns}
        for name in reversed(turns) if back and index % 2 else turns:
            if name not in seldom or index % 5 == 0:
                found[name].append(turns[name]())
    return found


def quartiles(values: Sequence[float], scale: float = 1) -> tuple[float, float, float]:
    """Return the quartiles times `scale`; of a single value that value."""
    many = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(many, n=4, method="inclusive")
    return low * scale, middle * scale, high * scale


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of what a round's two times are of each other."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float], form: str = ".2f", median: float | None = None) -> str:
    """Return quartiles as text, the median before the others; it may be given apart from them."""
    ends = (values[0], values[1] if median is None else median, values[-1])
    low, middle, high = (format(x, form) for x in ends)
    return f"{middle} ({low} to {high})"


def medians(times: Mapping[str, Sequence[float]], scale: float = 1e3) -> dict[str, float]:
    """Return the median of each candidate, of seconds in milliseconds."""
    return {name: statistics.median(found) * scale for name, found in times.items()}


def compared(times: Mapping[str, Sequence[float]], base: str, **where: object) -> list[Row]:
    """Return a row for each candidate: milliseconds, and how many times as long `base` takes."""
    rows = []
    for name, found in times.items():
        low, middle, high = quartiles(found, 1e3)
        row = {**where, "what": name, "ms": middle, "ms_quartiles": [low, high]}
        rows.append(row | {"ratio": list(ratios(times[base], found))})
    return rows


def comparison(rows: Iterable[Row], base: str, *where: str) -> str:
    """Return the table of `compared`."""
    cells = [
        [r[name] for name in (*where, "what")]
        + [spread(r["ms_quartiles"], ".3f", r["ms"]), spread(r["ratio"])]
        for r in rows
    ]
    return table([*where, "", "ms", f"times {base}"], cells, len(where) + 1)


def each_threads(options: argparse.Namespace) -> Iterator[int]:
    """Yield numbers of threads, and let torch use so many."""
    for threads in options.threads:
        torch.set_num_threads(threads)
        yield threads


def book(model: str, tokens: int, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return a model, and the first tokens of a book, `[1, tokens]`."""
    from kvpact.data import book_path
    from kvpact.integrations.models import load_model

    network, tokenizer = load_model(model, **options)
    text = book_path().read_text("utf-8")[: 8 * tokens] * 2
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, fewer than {tokens}")
    return network, ids


def twin(model: Any) -> Any:
    """Return a model with the same weights in the same memory, and a config of its own.

    kvpact's caches set the attention implementation of the model that they are made for.
    """
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})


def forward(model: Any, ids: torch.Tensor, cache: Any) -> None:
    """Carry out one forward pass, with logits of the last token only."""
    from kvpact.integrations.transformers.versions import named

    model(ids, **named(cache), logits_to_keep=1)


def filled(cache: Any, tokens: int, piece: int = 2048, batch: int = 1, device: str = "cpu") -> Any:
    """Store random tokens in the first layer of a cache, in pieces; return the cache."""
    from kvpact.testing.data import by_name

    geometry, draw = cache.geometry, torch.Generator(device).manual_seed(tokens)
    given = {"generator": draw, "device": device, "dtype": geometry.dtype}
    dims = geometry.head_dim, geometry.value_dim
    for start in range(0, tokens, piece):
        shape = (batch, geometry.num_kv_heads, min(piece, tokens - start))
        cache.store(0, **by_name(*(torch.randn(*shape, dim, **given) for dim in dims)))
    return cache


def native_level() -> str:
    """Return the instruction set of the native kernels; raise where there are none."""
    from kvpact.kernels.cpu import library

    return library().level


@contextmanager
def watched(owner: Any, names: Iterable[str]) -> Iterator[dict[str, float]]:
    """Add up the seconds of calls of an object's or a class's functions, by name."""
    real = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    seconds = dict.fromkeys(real, 0.0)

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds[name] += time.perf_counter() - begin

        return run

    for name, call in real.items():
        setattr(owner, name, timed(name, call))
    try:
        yield seconds
    finally:
        for name, call in real.items():
            setattr(owner, name, call)


def compare(
    options: argparse.Namespace, name: str, calls: Mapping[str, Call], base: str,
    told: Sequence[str],
) -> None:  # fmt: skip
    """Measure calls in turns beside one of them, and report on them."""
    times = in_turns({each: turn_of(call) for each, call in calls.items()}, options.rounds, warm=2)
    rows = compared(times, base)
    report(options, name, rows, comparison(rows, base), told)
