"""Values alone where keys are made of them: bytes, and a step's time, beside K and V apart.

    python benchmarks/k_eq_v.py [SPEC …]

One full layer of a Gemma 4 with `attention_k_eq_v`, 4 KV heads of 512 and 8 query heads, random
weights, one thread. Steps of the caches take turns; times are medians of the thread's own time, of
the whole tiny model.
"""

import sys
import time
from statistics import median

import torch
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

SPECS = ("none", "turboquant:bits=4", "trellis:bits=4", "int:bits=8")
TOKENS = (512, 2048, 8192)
STEPS = 15


@torch.no_grad()
def model() -> Gemma4ForCausalLM:
    """Return a model of one full layer."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=["full_attention"],
    )
    made = Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    # As large as random weights make them, logits let most weights of tokens be denormal.
    made.model.layers[0].self_attn.q_norm.weight.fill_(0.1)
    return made


@torch.no_grad()
def main() -> None:
    """Print a line for each spec and length."""
    torch.set_num_threads(1)
    decoder = model()
    print("spec tokens: times smaller | ms of a step: DynamicCache, apart, alone | alone / apart")
    for spec in sys.argv[1:] or SPECS:
        for tokens in TOKENS:
            ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(0))
            caches = [
                DynamicCache(config=decoder.config),
                CompressedCache(decoder, spec),
                CompressedCache(decoder, spec, k_eq_v=True),
            ]
            for cache in caches:
                decoder(ids, **named(cache), logits_to_keep=1)
            times: list[list[float]] = [[], [], []]
            for _ in range(STEPS):
                for taken, cache in zip(times, caches, strict=True):
                    begin = time.thread_time()
                    decoder(ids[:, :1], **named(cache))
                    taken.append(1e3 * (time.thread_time() - begin))
            theirs, apart, alone = map(median, times)
            smaller = caches[1].nbytes / caches[2].nbytes
            print(
                f"{spec} {tokens}: {smaller:.3f} | {theirs:.2f}, {apart:.2f}, {alone:.2f} | "
                f"{alone / apart:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
