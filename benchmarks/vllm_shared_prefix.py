"""Two vLLM engines over one store: the second's first token, beside an engine that computes.

    .venv-vllm/bin/python benchmarks/vllm_shared_prefix.py [--tokens 2000] [--stores redis]

The first engine computes prompts and saves them; when it has ended, a second one answers the same
prompts, by turns with an engine that has vLLM's own bf16 cache, no store, and computes them. What
is printed are medians, and the median and quartiles of what a round's two times are of each other.
The bytes are those of the store, against K and V of the tokens in fp16. Without --model it is
SmolLM2-135M. A store that is not installed is left out, and said.
"""

from statistics import median

import runner
from shared_store import place
from vllm_decode import ask, end, engine, prompts_of

from kvpact.integrations.models import SMOLLM2, packaged_folder
from kvpact.integrations.vllm import SETTING
from kvpact.stores import open_store


def sharing(url):
    return {
        "kv_transfer_config": {
            "kv_connector": "KVPactConnector",
            "kv_connector_module_path": "kvpact.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": url, "timeout": 30},
        }
    }


def fp16_bytes(model, tokens):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return tokens * config.num_hidden_layers * config.num_key_value_heads * 2 * dim * 2


def main():
    args = runner.arguments(
        __doc__, tokens=2000, rounds=5, spec="turboquant:bits=4,sinks=0",
        stores=["directory", "redis", "mooncake"], threads=1, model=str,
    )  # fmt: skip
    model = args.model or str(packaged_folder(SMOLLM2))
    options = {
        "model": model,
        "dtype": "bfloat16",
        "block_size": 64,
        "max_model_len": args.tokens + 64,
        "max_num_batched_tokens": args.tokens + 64,
        "kv_cache_memory_bytes": 1 << 30,
    }
    # Each engine's first prompt, which is not counted, touches its memory.
    prompts = prompts_of(1 + args.rounds, args.tokens, 3)
    whole, setting = (args.tokens - 1) // 64 * 64, {SETTING: args.spec}
    room = fp16_bytes(model, args.tokens) * len(prompts)
    computing = engine({}, options, args.threads)
    cells = []
    for kind in args.stores:
        with place(kind, max(room, 64 << 20)) as url:
            if url is None:
                cells.append([kind, "not installed", "", "", ""])
                continue
            first = engine(setting, options | sharing(url), args.threads)
            for prompt in prompts:
                ask(first, prompts=[prompt], tokens=1)
            end(first)
            second, rounds = engine(setting, options | sharing(url), args.threads), []
            others = prompts_of(len(prompts), args.tokens, len(kind))
            for prompt, fresh in zip(prompts, others, strict=True):
                computed = ask(computing, prompts=[fresh], tokens=1)
                loaded = ask(second, prompts=[prompt], tokens=1)
                assert (computed["cached"], loaded["cached"]) == (0, whole), "not what was asked"
                rounds.append((computed["first"], loaded["first"]))
            end(second)
            with open_store(url) as store:
                part = store.stats().bytes / len(prompts) / fp16_bytes(model, whole)
        computed, loaded = (median(times) for times in zip(*rounds[1:], strict=True))
        times = runner.spread(runner.ratios(*zip(*rounds[1:], strict=True)), ".1f")
        cells.append([kind, f"{computed:.3f}", f"{loaded:.3f}", times, f"{part:.3f}"])
    end(computing)
    columns = "store | computed s | loaded s | times as soon | bytes of fp16's"
    body, told = runner.table(columns, cells), {"in the store": whole}
    names = ("tokens", "spec", "rounds", "threads")
    runner.report(args, "vllm_shared_prefix", {"cells": cells}, body, names, **told)


if __name__ == "__main__":
    main()
