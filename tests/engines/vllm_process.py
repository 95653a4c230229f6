"""Starts vLLM, does what a JSON file asks for, and writes what came out into another.

    python vllm_process.py ASK.json ANSWER.json

A process of its own for each engine: kvpact's setting is one of the whole process.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def greedy(llm, prompts, tokens):
    """The tokens of greedy answers, all prompts in one batch."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def forced(llm, prompt):
    """The log-probability of each token of a prompt but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    given = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    return [one[token].logprob for token, one in given]


def main():
    ask = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, seed=0, **ask["llm"]
    )
    answer = {"capacity": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens}
    answer["greedy"] = [greedy(llm, *batch) for batch in ask.get("greedy", [])]
    answer["forced"] = [forced(llm, prompt) for prompt in ask.get("forced", [])]
    answer["metrics"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    # vLLM refuses while any page is held.
    answer["all_free"] = llm.reset_prefix_cache()
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
