"""Attention over a prompt, and over chunks of one behind a long past, beside torch's own.

    python benchmarks/prompt.py [--tokens 512 2048 4096 8192] [--past 4096 8192 16384 32768] …

One layer, fp32. A: 32 query heads, 8 KV heads, D = 128; B: 9, 3, 64. Ours are the calls that an
engine makes, `cache.attend`: the new tokens are checked, attended and stored in 4 bits. torch's are
`scaled_dot_product_attention` over K and V that lie ready, nothing stored: with `is_causal` for a
prompt, with a mask over a past; there, for information, also without a mask, which gives other
numbers and is as fast as torch can be. All take turns in each round. Medians, quartiles and ratios
of the medians are printed and written to DIR/prompt.json and DIR/prompt.md.
"""

from functools import partial
from typing import Any

import runner
import torch
from attend_calls import SHAPES
from torch.nn.functional import scaled_dot_product_attention

from kvpact import CacheGeometry, create_cache


def turns_of(spec: str, shape: str, past: int, new: int) -> dict[str, runner.Turn]:
    """Return the candidates for `new` tokens behind `past` ones."""
    heads, groups, dim = SHAPES[shape]
    draw = torch.Generator().manual_seed(past + new)
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    whole = [torch.randn(1, heads, past + new, dim, generator=draw) for _ in "kv"]
    q = torch.randn(1, heads * groups, new, dim, generator=draw)
    held = create_cache(spec, geometry)
    for start in range(0, past, 1024):
        k, v = (x[:, :, start : min(past, start + 1024)] for x in whole)
        held.store(0, k=k, v=v)
    k, v = (x[:, :, past:].contiguous() for x in whole)

    def ours() -> float:
        cache = held.fork() if past else create_cache(spec, geometry)
        return runner.turn_of(lambda: cache.attend(0, k=k, v=v, q=q))()

    def theirs(**options: Any) -> runner.Turn:
        options["enable_gqa"] = True
        return runner.turn_of(partial(scaled_dot_product_attention, q, *whole, **options))

    if not past:
        return {"kvpact": ours, "sdpa": theirs(is_causal=True)}
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    return {"kvpact": ours, "sdpa": theirs(attn_mask=mask), "sdpa, no mask": theirs()}


def row_of(times: dict[str, list[float]], **case: Any) -> runner.Row:
    """Return medians and quartiles in milliseconds, and how much longer torch takes."""
    ms = runner.medians(times)
    told = {name: list(runner.quartiles(found, 1e3)[::2]) for name, found in times.items()}
    ratios = {name: ms[name] / ms["kvpact"] for name in ms if name != "kvpact"}
    return {**case, "ms": ms, "ms_quartiles": told, "ratios": ratios}


def cells(row: runner.Row) -> list[object]:
    """Return a row of the table."""
    names = ("kvpact", "sdpa")
    ms = [runner.spread(row["ms_quartiles"][name], ".2f", row["ms"][name]) for name in names]
    ratios = (row["ratios"].get(name) for name in ("sdpa", "sdpa, no mask"))
    place = [row[name] for name in ("shape", "past", "new", "threads")]
    return [*place, *ms, *("" if x is None else f"{x:.2f}" for x in ratios)]


def main() -> None:
    options = runner.arguments(
        __doc__, tokens=[512, 2048, 4096, 8192], past=[4096, 8192, 16384, 32768],
        chunks=[256, 512], shapes=SHAPES, spec="turboquant:bits=4", threads=[1, 2], rounds=9,
        out=runner.BENCH,
    )  # fmt: skip
    works = [(0, new) for new in options.tokens]
    works += [(past, new) for past in options.past for new in options.chunks]
    rows: list[runner.Row] = []
    for shape in options.shapes:
        for past, new in works:
            turns = turns_of(options.spec, shape, past, new)
            for threads in runner.each_threads(options):
                times = runner.in_turns(turns, options.rounds, warm=2)
                rows.append(row_of(times, shape=shape, past=past, new=new, threads=threads))
    columns = "shape | past | new | threads | kvpact, ms | sdpa, ms | sdpa / kvpact | "
    body = runner.table(columns + "without a mask / kvpact", map(cells, rows))
    title = "Attention over prompts and chunks"
    runner.report(options, "prompt", rows, body, ("spec", "rounds"), title=title)


if __name__ == "__main__":
    main()
