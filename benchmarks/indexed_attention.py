"""A decode step's attention to the tokens that an index chooses, beside attention to all of them.

    python benchmarks/indexed_attention.py [--tokens 32768] [--chosen 2048] [--threads 1]

One layer as DeepSeek V3.2 has them: 16 query heads over latents of 512 and rotated keys of 64, and
an index of 64 heads of 128 channels. ``full``: attention over all packed latents; ``by the mask``:
over the same with the choice as a mask; ``chosen``: the chosen slots alone; ``scan, chosen``: the
same, and before it the scores of the packed keys of the index; ``with top-k``: torch's top-k
between the two, too; ``exact keys``: scores of keys that are not packed, as the model's own code
computes them, and top-k. All take turns; medians. The last column is how often ``full`` takes as
long.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.integrations.transformers.index_scan import PackedKeys
from kvpact.quantizers.channels import to_integers

HEADS, LATENT, ROPE, INDEX_HEADS, WIDTH = 16, 512, 64, 64, 128


def turns(spec: str, tokens: int, chosen: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache = create_cache(spec, CacheGeometry.mla(1, LATENT, ROPE, torch.float32))
    for _ in range(0, tokens, 4096):
        cache.store(0, k=random(1, 1, 4096, LATENT), v=random(1, 1, 4096, ROPE))
    step = cache.store(0, k=random(1, 1, 1, LATENT), v=random(1, 1, 1, ROPE))
    q = random(1, HEADS, 1, LATENT + ROPE)
    keys = random(1, tokens + 1, WIDTH)
    packed = PackedKeys(*to_integers(keys[:, : tokens - 64], 1, 0), keys[:, tokens - 64 :])
    queries, weight = random(1, 1, INDEX_HEADS, WIDTH), random(1, 1, INDEX_HEADS)
    everything = AttendConfig(softmax_scale=0.05)

    def mask_of(scores: torch.Tensor) -> AttendConfig:
        found = scores.topk(chosen, dim=-1).indices
        mask = torch.zeros(1, 1, 1, tokens + 1, dtype=torch.bool).scatter_(-1, found[:, None], True)
        return replace(everything, mask=mask, is_causal=False, sparse=True)

    def exact() -> AttendConfig:
        products = (queries @ keys.mT.unsqueeze(1) * WIDTH**-0.5).relu()
        return mask_of((weight.unsqueeze(-2) @ products).squeeze(-2))

    sparse = mask_of(packed.scores(queries, weight))
    return {
        "full": lambda: step.attend(q, everything),
        "by the mask": lambda: step.attend(q, replace(sparse, sparse=False)),
        "chosen": lambda: step.attend(q, sparse),
        "scan, chosen": lambda: (packed.scores(queries, weight), step.attend(q, sparse)),
        "with top-k": lambda: step.attend(q, mask_of(packed.scores(queries, weight))),
        "exact keys": exact,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chosen", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--spec", default="turboquant:bits=4")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    calls = turns(options.spec, options.tokens, options.chosen)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    full = statistics.median(times["full"])
    print(f"{options.spec}, {options.chosen} of {options.tokens} tokens, {options.threads} threads")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:>14}{median * 1e3:>9.2f} ms{full / median:>7.2f}")


if __name__ == "__main__":
    main()
