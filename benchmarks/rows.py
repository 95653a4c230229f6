"""Attention with many query rows per KV head, native beside torch.

    python benchmarks/rows.py [--tokens 4096] [--queries 1 2 4 …] [--shapes A B MLA] [--out DIR]

Chunks of a prompt, speculative checks, latents: as many queries as --queries say over T cached
tokens of one layer, fp32. A: 32 query heads, 8 KV heads, D = 128; B: 9, 3, 64; MLA: 16 query heads
over latents of 512 and rotated keys of 64. ``torch`` is the torch body over the same slots; ``few``
and ``many`` are the native kernels for few and for many rows (the dispatcher's choice is marked);
latents have the second one alone. All take turns in each round; medians, quartiles and ratios in
this run are written to DIR/rows.json and DIR/rows.md.
"""

import itertools
from typing import Any

import runner
import torch
from attend_calls import views_of

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels import AttendCall
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import library

SHAPES = {"A": (8, 4, 128, None), "B": (3, 3, 64, None), "MLA": (1, 16, 512, 64)}
NEVER = 1 << 30


def views(spec: str, shape: str, tokens: int, ring: int, kernel: str) -> list[Any]:
    """Return plans and views of the first layer of caches that hold the same tokens."""
    heads, _, dim, rope = SHAPES[shape]
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    if rope:
        geometry = CacheGeometry.mla(1, dim, rope, torch.float32)
    cache = create_cache(spec, geometry, backend=kernel)
    return views_of(runner.filled(cache, tokens, 1024), ring)


def forced(rows: int, call: runner.Call) -> runner.Call:
    """Return a call whose kernel for many rows begins at `rows`."""

    def run() -> object:
        before, native.many_rows = native.many_rows, lambda *_: rows
        try:
            return call()
        finally:
            native.many_rows = before

    return run


def calls(
    spec: str, shape: str, tokens: int, queries: int, ring: int
) -> tuple[dict[str, list[runner.Call]], str]:
    """Return the candidates, a call per cache of the ring, and which one the dispatcher takes."""
    heads, groups, dim, rope = SHAPES[shape]
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(1, heads * groups, queries, dim + (rope or 0), generator=generator)
    k, v = (torch.randn(1, heads, queries, d, generator=generator) for d in (dim, rope or dim))
    config = AttendConfig(softmax_scale=dim**-0.5)

    def over(kernel: str) -> tuple[list[runner.Call], AttendCall]:
        found = views(spec, shape, tokens, ring, kernel)
        made = [(plan, AttendCall(view, k, v, q, config, None, bool(rope))) for plan, view in found]
        attending = [lambda plan=plan, call=call: plan.attend((call,)) for plan, call in made]
        return attending, made[0][1]

    natives, first = over("cpu")
    result = {"torch": over("torch")[0], "many": [forced(1, call) for call in natives]}
    if not rope:
        result["few"] = [forced(NEVER, call) for call in natives]
    many = groups * queries >= native.many_rows(library(), first)
    return result, "many" if many else "few"


def tables(rows: list[runner.Row]) -> str:
    """Return a table per shape, format and thread count."""
    keys, parts = ("shape", "spec", "tokens", "threads"), []
    columns = "queries | torch, ms | few rows, ms | many rows, ms | taken | torch / taken"
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        cells = []
        for row in (r for r in rows if tuple(r[k] for k in keys) == key):
            ms = row["ms"]
            told = {n: runner.spread(x, ".3f", ms[n]) for n, x in row["ms_quartiles"].items()}
            times = [told.get(name, "-") for name in ("torch", "few", "many")]
            ratio = f"{ms['torch'] / ms[row['taken']]:.2f}"
            cells.append([row["queries"], *times, row["taken"], ratio])
        title = "## {}, `{}`, {} tokens, {} thread(s)\n\n".format(*key)
        parts.append(title + runner.table(columns, cells))
    return "\n\n".join(parts)


def main() -> None:
    options = runner.arguments(
        __doc__, tokens=[4096], queries=[1, 2, 4, 8, 12, 16, 17, 32, 64, 128, 512], shapes=SHAPES,
        specs=["turboquant:bits=4", "int:bits=8"], threads=[1, 2], rounds=9, ring=48,
        out=runner.BENCH,
    )  # fmt: skip
    level, rows = runner.native_level(), []
    for shape, spec, tokens in itertools.product(options.shapes, options.specs, options.tokens):
        for threads in runner.each_threads(options):
            for queries in options.queries:
                found, taken = calls(spec, shape, tokens, queries, options.ring)
                turns = {name: runner.turn_of(*ring) for name, ring in found.items()}
                times = runner.in_turns(turns, options.rounds, warm=2)
                case = {"shape": shape, "spec": spec, "tokens": tokens, "taken": taken}
                spreads = {name: runner.quartiles(x, 1e3)[::2] for name, x in times.items()}
                figures = {"ms": runner.medians(times), "ms_quartiles": spreads}
                rows.append(case | {"threads": threads, "queries": queries} | figures)
    title = "Attention with many query rows"
    runner.report(options, "rows", rows, tables(rows), ("rounds",), level=level, title=title)


if __name__ == "__main__":
    main()
