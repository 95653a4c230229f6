"""Values alone where keys are made of them: bytes, and a step's time, beside K and V apart.

    python benchmarks/k_eq_v.py [SPEC …]

One full layer of a Gemma 4 with `attention_k_eq_v`, 4 KV heads of 512 and 8 query heads, random
weights, one thread. Steps of the caches take turns; times are medians of the thread's own time, of
the whole tiny model.
"""

import time
from functools import partial

import runner
import torch
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig

from kvpact.integrations.transformers import CompressedCache

SPECS = ["none", "turboquant:bits=4", "trellis:bits=4", "int:bits=8"]


def model() -> Gemma4ForCausalLM:
    """Return a model of one full layer."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=8, global_head_dim=512, num_global_key_value_heads=4,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, layer_types=["full_attention"],
    )  # fmt: skip
    made = Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    # As large as random weights make them, logits let most weights of tokens be denormal.
    made.model.layers[0].self_attn.q_norm.weight.fill_(0.1)
    return made


@torch.no_grad()
def main() -> None:
    options = runner.arguments(__doc__, "specs", specs=SPECS, tokens=[512, 2048, 8192], rounds=15)
    torch.set_num_threads(1)
    decoder, rows, cells = model(), [], []
    for spec in options.specs:
        for tokens in options.tokens:
            ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(0))
            caches = {
                "DynamicCache": DynamicCache(config=decoder.config),
                "apart": CompressedCache(decoder, spec),
                "alone": CompressedCache(decoder, spec, k_eq_v=True),
            }
            turns = {}
            for name, cache in caches.items():
                runner.forward(decoder, ids, cache)
                step = partial(runner.forward, decoder, ids[:, :1], cache)
                turns[name] = runner.turn_of(step, clock=time.thread_time)
            ms = runner.medians(runner.in_turns(turns, options.rounds, warm=0))
            smaller = caches["apart"].nbytes / caches["alone"].nbytes
            rows.append({"spec": spec, "tokens": tokens, "smaller": smaller, "ms": ms})
            ratio = ms["alone"] / ms["apart"]
            cells.append([spec, tokens, *(f"{x:.2f}" for x in (smaller, *ms.values(), ratio))])
    names = "spec | tokens | times smaller | DynamicCache, ms | apart, ms | alone, ms"
    runner.report(options, "k_eq_v", rows, runner.table(f"{names} | alone / apart", cells))


if __name__ == "__main__":
    main()
