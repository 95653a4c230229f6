"""Two vLLM engines, one Mooncake master: the second loads the prompt that the first computed.

    python examples/shared_prefix/shared_prefix.py [--tokens 2000] [--model FOLDER]

All on loopback. The first engine gives the memory in which the cluster keeps chunks, so each byte
that the second loads comes from the first one's process over TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvpact.data import book_path
from kvpact.integrations.models import SMOLLM2, packaged_folder

QUESTION = "\n\nQuestion: Who tells this story?\nAnswer:"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start_master(stack: ExitStack) -> str:
    """Start a Mooncake master, wait until it listens, and return the URL of its cluster."""
    binary = shutil.which("mooncake_master", path=Path(sys.executable).parent)
    if binary is None:
        sys.exit("mooncake_master is missing: pip install 'kvpact[mooncake]'")
    port, admin = free_port(), free_port()
    here = ["--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    here += ["--metrics_host=127.0.0.1", f"--metrics_port={admin}"]
    quiet = subprocess.DEVNULL
    master = subprocess.Popen([binary, *here], stdout=quiet, stderr=quiet)
    stack.callback(master.wait)
    stack.callback(master.kill)
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return f"mooncake://127.0.0.1:{port}?admin={admin}"
        with suppress(subprocess.TimeoutExpired):
            sys.exit(f"mooncake_master ended with {master.wait(0.01)}")


class Engine:
    """An engine in a process of its own; it starts at once."""

    def __init__(self, stack: ExitStack, spec: str, model: str, store: str, log: Path) -> None:
        env = os.environ | {
            "KVPACT_VLLM_SPEC": spec,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # both engines have all cores
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(Path(__file__).with_name("engine.py")), model, store]
        pipe, self.log = subprocess.PIPE, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=env, stdin=pipe, stdout=pipe, stderr=file, text=True
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.stdin.close)

    def answer(self, prompt: str, tokens: int) -> dict[str, Any]:
        self.process.stdin.write(json.dumps([prompt, tokens]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the engine ended; {self.log} says why")
        return json.loads(line)


def prompts_of(model: str, tokens: int) -> list[str]:
    """Return a question behind two pages of a book, each prompt of about so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    book = tokenizer.encode(book_path().read_text("utf-8"))
    room = tokens - len(tokenizer.encode(QUESTION))
    return [tokenizer.decode(book[i * room : (i + 1) * room]) + QUESTION for i in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="turboquant:bits=4,sinks=0")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--model", help="folder of a model; SmolLM2-135M if omitted")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for the engines' logs")
    args = parser.parse_args()
    model = args.model or str(packaged_folder(SMOLLM2))
    with ExitStack() as stack:
        store = start_master(stack)
        print("starting two engines …", flush=True)
        stores = (f"{store}&segment_size=512MiB", store)
        engines = [
            Engine(stack, args.spec, model, url, args.logs / f"engine{i}.log")
            for i, url in enumerate(stores, 1)
        ]
        # Another prompt comes first: what a process does once for all is no part of the times.
        for prompt in reversed(prompts_of(model, args.tokens)):
            computed, loaded = (engine.answer(prompt, 24) for engine in engines)
    for name, one in (("first", computed), ("second", loaded)):
        print(f"the {name} engine: {one['prompt']:,} tokens, {one['loaded']:,} of them loaded;")
        print(f"    first token after {one['seconds']:.2f} s; {one['text']!r}")
    print(f"{computed['seconds'] / loaded['seconds']:.1f} times as soon")


if __name__ == "__main__":
    main()
