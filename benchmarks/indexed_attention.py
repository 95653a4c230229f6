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

from dataclasses import replace

import runner
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.integrations.transformers.layers.index_scan import PackedKeys
from kvpact.quantizers.channels import to_integers

HEADS, LATENT, ROPE, INDEX_HEADS, WIDTH = 16, 512, 64, 64, 128


def calls(spec: str, tokens: int, chosen: int) -> dict[str, runner.Call]:
    """Return what is measured, by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    geometry = CacheGeometry.mla(1, LATENT, ROPE, torch.float32)
    cache = runner.filled(create_cache(spec, geometry), tokens, 4096)
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
    sizes = {"tokens": 32768, "chosen": 2048, "spec": "turboquant:bits=4"}
    options = runner.arguments(__doc__, **sizes, threads=1, rounds=21)
    torch.set_num_threads(options.threads)
    found, told = calls(options.spec, options.tokens, options.chosen), [*sizes, "threads"]
    runner.compare(options, "indexed_attention", found, "full", told)


if __name__ == "__main__":
    main()
