"""vLLM's own caches beside kvpact's pages: capacity, prompts and decoding, in turns, in one run.

    .venv-vllm/bin/python benchmarks/vllm_decode.py [--first 256 2048 8000] [--tokens 2048 8000] …

All engines live beside each other and work one after the other, round by round. What is compared,
with vLLM's own bf16 cache, are the tokens that fit into the same memory, and the times of one
round: the first token of a prompt that is in no cache (of short ones, the median of some); and a
step of the whole batch, the median of `--steps`, over prompts that are in the prefix cache and
share no page. `--threads` and `--memory` (MiB of the cache) are each engine's, `--own` the
`--kv-cache-dtype` of vLLM's others, `--calibration` is a file of what trellis learnt of the model.
On a machine that others use, too, `--clock cpu` counts an engine's own processor time, which with
one thread is less disturbed.

Without --model it is a random Llama of two layers with the heads of Llama 3.2 1B (32 query heads
over 8 KV heads of width 64) and little else: nearly all of a step is attention.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count, pairwise
from statistics import median

import runner
import torch

from kvpact.integrations.vllm import CALIBRATION, SETTING

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SHORT = 2048
"""Tokens of the prompts of a round, at least."""


def engine(settings, options, threads, clock="wall"):
    """Start an engine in a process of its own, which answers a line with a line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVPACT_VLLM"))}
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
    }
    env |= settings
    command = [sys.executable, __file__, "--clock", clock, "--child", json.dumps(options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def ask(process, **what):
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise SystemExit("the engine ended")


def end(process):
    """Let an engine end: it saves what waits."""
    process.stdin.close()
    process.wait()


def child(options, clock):
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, seed=0, **options)
    name = "CPU_ATTN" if current_platform.is_cpu() else "FLASH_ATTN"
    ours = AttentionBackendEnum[name].get_path().startswith("kvpact.")
    assert ours == (SETTING in os.environ), "another cache than was asked for"

    engine, numbers = llm.llm_engine, count()

    def generate(prompts, tokens):
        """Seconds to the first token of all, and of each later step; tokens that were cached."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = clock()
        for prompt in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        ends, started = [begin], {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            ends.append(clock())
            if len(started) < len(prompts):
                started |= {one.request_id: one.num_cached_tokens for one in outputs}
                ends = [begin, ends[-1]]
        first, *steps = (after - before for before, after in pairwise(ends))
        return {"first": first, "steps": steps, "cached": sum(started.values())}

    cache = engine.vllm_config.cache_config
    for line in sys.stdin:
        what = json.loads(line)
        found = cache.num_gpu_blocks * cache.block_size if "capacity" in what else generate(**what)
        print("answer", json.dumps(found), flush=True)


def little_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def prompts_of(batch, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (batch, tokens), generator=generator).tolist()


def compare(rounds):
    """Cells of a table: each engine's median in ms, and that of its ratio to the first's."""
    own, *others = zip(*rounds, strict=True)
    cells = [f"{1000 * median(own):.1f}"]
    for times in others:
        cells += [f"{1000 * median(times):.1f}", runner.spread(runner.ratios(times, own))]
    return cells


def main():
    args = runner.arguments(
        __doc__, child=str, first=[256, 2048, 8000], tokens=[2048, 8000], batch=8, steps=16,
        rounds=7, threads=1, memory=2560, clock="wall", spec=["turboquant:bits=4,sinks=0"],
        calibration=str, own=[str], model=str,
    )  # fmt: skip
    if args.child:
        child(json.loads(args.child), CLOCKS[args.clock])
        return
    options = {
        "model": args.model or little_model(),
        "dtype": "bfloat16",
        "block_size": 128,
        "max_model_len": max(args.first + args.tokens) + args.steps + 64,
        "max_num_seqs": args.batch,
        "kv_cache_memory_bytes": args.memory << 20,
    }
    kinds = {"bf16": ({}, {})} | {own: ({}, {"kv_cache_dtype": own}) for own in args.own}
    for spec in args.spec:
        learns = {CALIBRATION: args.calibration} if "trellis" in spec and args.calibration else {}
        kinds[spec] = {SETTING: spec, **learns}, {}
    how = args.threads, args.clock
    engines = [engine(settings, options | more, *how) for settings, more in kinds.values()]
    own, *others = kinds
    columns = ["", f"{own} ms"]
    columns += [x for name in others for x in (f"{name} ms", "times as long (quartiles)")]
    held = [ask(one, capacity=True) for one in engines]
    more = [x for n in held[1:] for x in (f"{n:,}", f"{n / held[0]:.2f}")]
    cells = [[f"tokens of {args.memory:,} MiB", f"{held[0]:,}", *more]]
    seeds = count()
    for tokens in args.first:
        rounds = []
        for _ in range(args.rounds + 1):
            cold = prompts_of(max(SHORT // tokens, 1), tokens, next(seeds))
            rounds.append(
                [median(ask(one, prompts=[p], tokens=1)["first"] for p in cold) for one in engines]
            )
        # The first round allocates.
        cells.append([f"first token, {tokens:,}", *compare(rounds[1:])])
    for tokens in args.tokens:
        batch = prompts_of(args.batch, tokens, next(seeds))
        for one in engines:
            ask(one, prompts=batch, tokens=1)
        rounds = [
            [median(ask(one, prompts=batch, tokens=1 + args.steps)["steps"]) for one in engines]
            for _ in range(args.rounds)
        ]
        cells.append([f"step of {args.batch}, {tokens:,}", *compare(rounds)])
    for one in engines:
        end(one)
    body, told = runner.table(columns, cells), ("model", "threads", "rounds")
    runner.report(args, "vllm_decode", {"columns": columns, "cells": cells}, body, told)


if __name__ == "__main__":
    main()
