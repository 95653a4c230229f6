"""Time of a DynamicCache before and after kvpact told malloc anything, in one process.

    python benchmarks/told.py [--model smollm2] [--tokens 512 2048] [--threads 2] [--rounds 7]

Medians in milliseconds of a prompt, and of a step behind it, and their ratios: above 1 the exact
cache is slower after a compressed one has stored a prompt of 4,000 tokens.
"""

from functools import partial

import runner
import torch
from transformers import DynamicCache

from kvpact.integrations.transformers import CompressedCache

STEPS = 8


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    options = runner.arguments(__doc__, model="smollm2", tokens=[512, 2048], threads=2, rounds=7)
    torch.set_num_threads(options.threads)
    model, ids = runner.book(options.model, 4096)
    rows = {count: [] for count in options.tokens}
    for told in (False, True):
        if told:
            other = CompressedCache(model)
            for part in ids[:, :4001].split(4000, 1):
                runner.forward(model, part, other)
            model.set_attn_implementation("sdpa")
        for count, row in rows.items():
            prompt, *tokens = ids[:, : count + STEPS].split([count] + [1] * STEPS, 1)

            def turn(prompt=prompt, tokens=tokens) -> tuple[float, float]:
                cache = DynamicCache(config=model.config)
                first, *steps = (
                    partial(runner.forward, model, x, cache) for x in (prompt, *tokens)
                )
                return runner.turn_of(first)(), runner.turn_of(*steps)()

            rounds = runner.in_turns({"": turn}, options.rounds, warm=2)[""]
            prompts, steps = zip(*rounds, strict=True)
            row.append(runner.medians({"prompt": prompts, "step": steps}))
    cells = [
        [count, what, before[what], after[what], f"{after[what] / before[what]:.3f}"]
        for count, (before, after) in rows.items()
        for what in before
    ]
    body = runner.table("prompt | | ms before | after | ratio", cells, 2)
    runner.report(options, "told", rows, body, ("model", "threads", "rounds"))


if __name__ == "__main__":
    main()
