"""Shares of a prompt's time that encoding and storing its keys and values take.

    python benchmarks/prompt_share.py [--model smollm2] [--spec trellis:bits=4 …] [--tokens 2048] …

The beginning of a book is given to the model in one call, logits of the last token only, with a
CompressedCache. Encoding is what turns tokens into slots. Storing is all that the layers do to
keep them: encoding, what codecs learn from the first tokens, checks, memory, copies of exact
tokens. Specs take turns in each round. Printed are medians in milliseconds, and of each round's
times the shares: median and quartiles.
"""

from functools import partial
from typing import Any

import runner
import torch

from kvpact.cache.layer.layer import CacheLayer
from kvpact.integrations.transformers import CompressedCache

NAMES = ("prompt", "encoding", "storing")


def turn(model: Any, ids: torch.Tensor, spec: str) -> tuple[float, float, float]:
    """Return the seconds of a prompt, of encoding, and of storing."""
    cache = CompressedCache(model.config, spec)
    with runner.watched(CacheLayer, ("prepare", "write")) as seconds:  # the second one encodes
        whole = runner.turn_of(lambda: runner.forward(model, ids, cache))()
    return whole, seconds["write"], sum(seconds.values())


@torch.no_grad()
def main() -> None:
    specs = ["trellis:bits=4", "turboquant:bits=4"]
    options = runner.arguments(
        __doc__, model="smollm2", spec=specs, tokens=2048, threads=[1, 2], rounds=7
    )
    model, ids = runner.book(options.model, options.tokens)
    rows: list[runner.Row] = []
    for threads in runner.each_threads(options):
        turns = {spec: partial(turn, model, ids, spec) for spec in options.spec}
        for spec, found in runner.in_turns(turns, options.rounds).items():
            times = dict(zip(NAMES, zip(*found, strict=True), strict=True))
            row: runner.Row = {"spec": spec, "tokens": ids.shape[1], "threads": threads}
            row |= {f"{name}_ms": ms for name, ms in runner.medians(times).items()}
            shares = {name: runner.ratios(times[name], times["prompt"]) for name in NAMES[1:]}
            rows.append(row | shares)
    cells = [
        [f"`{r['spec']}`", r["tokens"], r["threads"], f"{r['prompt_ms']:.0f}"]
        + [x for n in NAMES[1:] for x in (f"{r[f'{n}_ms']:.1f}", runner.spread(r[n], ".1%"))]
        for r in rows
    ]
    names = "spec | tokens | threads | prompt, ms | encoding, ms | share | storing, ms | share"
    runner.report(options, "prompt_share", rows, runner.table(names, cells), ("model",))


if __name__ == "__main__":
    main()
