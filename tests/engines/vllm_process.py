"""Starts vLLM, then answers what it is asked, line by line: `tests/helpers/vllm_engine.py`."""

import json
import os
import sys
import threading
import time


class Asked:
    """What can be asked; arguments and answers are JSON."""

    def __init__(self, llm):
        self.llm, self.engine = llm, llm.llm_engine

    def capacity(self):
        return self.engine.vllm_config.cache_config.kv_cache_size_tokens

    def greedy(self, prompts, tokens):
        """The tokens of greedy answers, all prompts in one batch."""
        answers = self._generate(prompts, max_tokens=tokens)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def forced(self, prompt):
        """The log-probability of each token of a prompt but the first."""
        (answer,) = self._generate([prompt], max_tokens=1, prompt_logprobs=0)
        given = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        return [one[token].logprob for token, one in given]

    def first_token(self, prompt):
        """The seconds until the first token of a prompt."""
        begin = time.perf_counter()
        self._generate([prompt], max_tokens=1)
        return time.perf_counter() - begin

    def sequence(self, requests):
        """The tokens of requests that come, and are aborted, at given steps; None where aborted."""
        answers, step = [None] * len(requests), 0
        while self.engine.has_unfinished_requests() or requests[-1]["comes"] >= step:
            for name, one in enumerate(requests):
                if one["comes"] == step:
                    prompt = {"prompt_token_ids": one["prompt"]}
                    params = self._params(max_tokens=one["tokens"])
                    self.engine.add_request(str(name), prompt, params)
                if one["aborted"] == step:
                    self.engine.abort_request([str(name)])
            for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                if output.finished:
                    answers[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
        return answers

    def metrics(self):
        return {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}

    def scraped(self):
        """What a server's page of metrics would have."""
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return generate_latest(get_prometheus_registry()).decode()

    def counts(self):
        """What both sides of kvpact's connector have counted until now."""
        sides = [side.counts for side in self._connectors()]
        return {name: sum(side[name] for side in sides) for name in sides[0]}

    def saved(self):
        """Wait until nothing waits to be saved."""
        while any(side.waiting for side in self._connectors()):
            threading.Event().wait(0.01)

    def forget(self):
        """Empty vLLM's prefix cache; whether that worked: not while any page is held."""
        return self.llm.reset_prefix_cache()

    def _connectors(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return self.engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()

    def _generate(self, prompts, **params):
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(given, self._params(**params), use_tqdm=False)

    @staticmethod
    def _params(**params):
        from vllm import SamplingParams

        return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **params)


def main():
    # Answers alone go to the pipe; what vLLM prints goes where its errors go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM

    options = json.loads(sys.argv[1])
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, seed=0, **options
    )
    asked = Asked(llm)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(asked, what)(**arguments)), file=answers)


if __name__ == "__main__":
    main()
