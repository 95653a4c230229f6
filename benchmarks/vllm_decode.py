"""Decoding in vLLM: its own bf16 cache beside kvpact's pages, in turns, in one run.

    .venv-vllm/bin/python benchmarks/vllm_decode.py [--tokens 2048 8000] [--batch 8]

Two engines live beside each other and decode one after the other, round by round. A round's time is
that of so many steps of the whole batch over prompts that are in the prefix cache; the prompts
differ, so that no page is shared. The first token is that of one prompt that is in no cache.

Without --model it is a random Llama of two layers with the heads of Llama 3.2 1B (32 query heads
over 8 KV heads of width 64) and little else: nearly all of a step is attention.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from kvpact.integrations.vllm import SETTING, served_spec


def engine(spec, options):
    """Start an engine in a process of its own, which answers a line with a line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVPACT_VLLM"))}
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if spec:
        env[SETTING] = spec
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process, **what):
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise SystemExit("the engine ended")


def child(options):
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, seed=0, **options)
    ours = AttentionBackendEnum.CPU_ATTN.get_path().startswith("kvpact.")
    assert ours == (served_spec() is not None), "another cache than was asked for"

    def generate(prompts, tokens):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    for line in sys.stdin:
        what = json.loads(line)
        first = generate(what["prompts"], 1)
        rest = generate(what["prompts"], 1 + what["steps"]) if what["steps"] else first
        again = generate(what["prompts"], 1) if what["steps"] else 0.0
        print("answer", json.dumps({"first": first, "steps": rest - again}), flush=True)


def little_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1 << 16,
    )
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def prompts_of(batch, tokens, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (batch, tokens), generator=generator).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8000])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spec", default="turboquant:bits=4,sinks=0")
    parser.add_argument("--model", help="folder of a model")
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    model = args.model or little_model()
    options = {
        "model": model,
        "dtype": "bfloat16",
        "block_size": 128,
        "max_model_len": max(args.tokens) + args.steps + 64,
        "max_num_seqs": args.batch,
        "kv_cache_memory_bytes": 5 << 29,
    }
    engines = [engine(None, options), engine(args.spec, options)]
    print(
        f"batch {args.batch}, {args.steps} steps a round, {args.spec}; {args.model or 'two layers'}"
    )
    print("| tokens | own ms/step | kvpact ms/step | times as fast | first token, times as long |")
    print("|---|---:|---:|---:|---:|")
    for tokens in args.tokens:
        # One prompt that no cache holds, for the first token; then those that are decoded.
        cold = [ask(one, prompts=prompts_of(1, tokens, 1), steps=0)["first"] for one in engines]
        batch = prompts_of(args.batch, tokens, 2)
        for one in engines:
            ask(one, prompts=batch, steps=0)
        rounds = [
            [ask(one, prompts=batch, steps=args.steps)["steps"] / args.steps for one in engines]
            for _ in range(args.rounds)
        ]
        own, mine = (1000 * median(times) for times in zip(*rounds, strict=True))
        speed = median(a / b for a, b in rounds)
        print(
            f"| {tokens:,} | {own:.1f} | {mine:.1f} | {speed:.2f} | {cold[1] / cold[0]:.2f} |",
            flush=True,
        )
    for one in engines:
        one.stdin.close()
        one.wait()


if __name__ == "__main__":
    main()
