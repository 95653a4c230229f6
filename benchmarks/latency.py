"""Time to the first token of a prompt, and of a decode step, beside transformers' DynamicCache.

    python benchmarks/latency.py [--model smollm2] [--spec trellis:bits=4] [--threads 1 2] …

Each cache has a model with the attention that is made for it, ``sdpa`` for DynamicCache, ``kvpact``
for the compressed one; both models have the same weights in memory, since where weights lie makes
them 5 % quicker or slower. The two take turns. A prompt is the
beginning of a book, given in one call, logits of the last token only; a step is one token after so
many. Printed are medians in milliseconds, and the ratio of each round's two times: its median and
quartiles. Below 1 the compressed cache is the quicker one. With --sliding layers that have a
sliding window are packed, too.
"""

from collections.abc import Callable
from functools import partial

import runner
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvpact.integrations.transformers import CompressedCache


def prompt(model: PreTrainedModel, make: Callable[[], Cache], ids: torch.Tensor) -> float:
    """Return the seconds of a prompt on a new cache."""
    return runner.turn_of(partial(runner.forward, model, ids, make()))()


def measure(options: runner.Options) -> list[runner.Row]:
    """Measure prompts and steps for every number of threads."""
    theirs, ids = runner.book(options.model, max([*options.prompts, *options.held]) + 1)
    ours = runner.twin(theirs)
    given = {"sliding": options.sliding}
    makes = {
        "DynamicCache": (theirs, lambda: DynamicCache(config=theirs.config)),
        "kvpact": (ours, lambda: CompressedCache(ours.config, options.spec, **given)),
    }
    rows = []

    def row(what: str, tokens: int, turns: dict[str, runner.Turn], rounds: int, warm: int) -> None:
        times = runner.in_turns(turns, rounds, warm, back=True)
        low, middle, high = runner.ratios(*list(times.values())[::-1])
        place = {"what": what, "tokens": tokens, "threads": threads}
        found = {"ms": [*runner.medians(times).values()], "ratio": middle, "quartiles": [low, high]}
        rows.append(place | found)

    for threads in runner.each_threads(options):  # noqa: B007, a row has it
        for count in options.prompts:
            prompts = {
                name: partial(prompt, model, make, ids[:, :count])
                for name, (model, make) in makes.items()
            }
            # Short prompts take more rounds: their times spread more.
            row("prompt", count, prompts, max(options.rounds, 4096 // count // 8), 1)
        for count in options.held:
            steps = {}
            for name, (model, make) in makes.items():
                cache, token = make(), ids[:, count : count + 1]
                runner.forward(model, ids[:, :count], cache)
                steps[name] = runner.turn_of(partial(runner.forward, model, token, cache))
            row("step", count, steps, options.steps, 3)
    return rows


def main() -> None:
    prompts, held = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096], [16, 32, 64, 128, 256, 1024]
    given = {"model": "smollm2", "spec": "trellis:bits=4", "sliding": str}
    given |= {"prompts": prompts, "held": held}
    options = runner.arguments(__doc__, **given, threads=[1, 2], rounds=5, steps=40)
    with torch.no_grad():
        rows = measure(options)
    cells = []
    for r in rows:
        ms, ratio = (f"{x:.1f}" for x in r["ms"]), runner.spread(r["quartiles"], ".3f", r["ratio"])
        cells.append([r["what"], r["tokens"], r["threads"], *ms, ratio])
    body = runner.table(" | tokens | threads | DynamicCache, ms | kvpact, ms | ratio", cells)
    runner.report(options, "latency", rows, body, ("model", "spec"))


if __name__ == "__main__":
    main()
