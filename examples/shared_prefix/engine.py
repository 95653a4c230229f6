"""One vLLM engine: answers the prompts that come line by line, and says how soon and from where.

    python engine.py MODEL STORE

`shared_prefix.py` starts two of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def start(model: str, store: str) -> Any:
    """Return vLLM's engine with kvpact's connector over a store."""
    from vllm import LLM

    return LLM(
        model=model,
        dtype="bfloat16",
        block_size=64,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        seed=0,
        kv_transfer_config={
            "kv_connector": "KVPactConnector",
            "kv_connector_module_path": "kvpact.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": store, "timeout": 10},
        },
    ).llm_engine


def answer(engine: Any, prompt: str, tokens: int) -> dict[str, Any]:
    """Answer greedily, and wait until the store has what was computed.

    `seconds` are those until the first token was there.
    """
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    outputs, times = [], [time.perf_counter()]
    engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=tokens))
    while engine.has_unfinished_requests():
        new = engine.step()
        times += [time.perf_counter()] * len(new)
        outputs += new
    while get_kv_transfer_group().waiting:  # what was computed is saved by a thread
        time.sleep(0.01)
    return {
        "text": outputs[-1].outputs[0].text,
        "seconds": times[1] - times[0],
        "prompt": len(outputs[-1].prompt_token_ids),
        "loaded": outputs[-1].num_cached_tokens,
    }


def main() -> None:
    """Answer until there is no more input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    engine = start(*sys.argv[1:])
    for line in sys.stdin:
        prompt, tokens = json.loads(line)
        print(json.dumps(answer(engine, prompt, tokens)), file=answers)


if __name__ == "__main__":
    main()
