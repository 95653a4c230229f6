"""Torch's candidates of `attend.py`, here or in a process whose instruction sets are capped."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from attend_ours import SHAPES, copies
from runner import Call, Turn, in_turns, turn_of
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK = ("sdpa fp32", "matmul fp32", "matmul bf16")
TORCH = ("sdpa", "matmul")
NO_BF16, AVX2 = "without bf16 dot products", "AVX2 alone"
CAPS = {
    NO_BF16: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    AVX2: {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""Environment variables under which torch computes as on a lesser processor, by what it lacks."""


def is_torch(name: str) -> bool:
    """Return whether a candidate is one of torch's."""
    return name.startswith(TORCH)


def hopeless(times: dict[str, list[float]]) -> set[str]:
    """Return torch's candidates that take five times as long as its best one.

    They are not what anything is compared with, and would take most of the time.
    """
    torches = {name: min(found) for name, found in times.items() if is_torch(name)}
    return {name for name, found in torches.items() if found > 5 * min(torches.values())}


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention as two matrix products per KV head: what torch is fast at."""
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def torch_calls(tokens: int, shape: str, ring: int, compiled: bool) -> dict[str, list[Call]]:
    """Return torch's candidates, a call per cache of the ring."""
    calls: dict[str, list[Call]] = {}
    if compiled:  # code that was compiled for another number of threads has that number in it
        torch.compiler.reset()
    for name in DTYPES:
        pairs, q = exact_ring(name, tokens, shape, ring)
        rows = q.view(1, SHAPES[shape][0], -1, q.shape[-1])
        calls[f"sdpa {name}"] = [
            lambda k=k, v=v, q=q: scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]
        calls[f"matmul {name}"] = [lambda k=k, v=v, q=rows: grouped(q, k, v) for k, v in pairs]
        if compiled and name != "fp16":
            fast = torch.compile(grouped, dynamic=False)
            fast(rows, *pairs[0])
            calls[f"matmul {name}, compiled"] = [
                lambda k=k, v=v, q=rows, fast=fast: fast(q, k, v) for k, v in pairs
            ]
    return calls


def exact_ring(
    name: str, tokens: int, shape: str, ring: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Return K and V of each cache of the ring, and q, in the dtype of that name."""
    heads, groups, dim = SHAPES[shape]
    dtype, generator = DTYPES[name], torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in "kv")
    count = copies(k.nbytes + v.nbytes, ring)
    pairs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(count - 1)]
    return pairs, torch.randn(1, heads * groups, 1, dim, generator=generator).to(dtype)


class Capped:
    """Torch's candidates in another process, one turn at a time, when asked for."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def prepare(
        self, threads: int, tokens: int, shape: str, ring: int, compiled: bool
    ) -> dict[str, Turn]:
        """Return the turns of all candidates."""
        self.pipe.send((threads, (tokens, shape, ring, compiled)))
        return {name: self._turn(name) for name in self.pipe.recv()}

    def _turn(self, name: str) -> Turn:
        def turn() -> float:
            self.pipe.send(name)
            return self.pipe.recv()

        return turn

    def changes(self) -> bool:
        """Return whether the cap makes a difference to matmul in bf16."""
        name = "matmul bf16"
        torch.set_num_threads(1)
        here = turn_of(*torch_calls(4096, "A", 96, False)[name])
        there = self.prepare(1, 4096, "A", 96, False)[name]
        times = in_turns({"here": here, "there": there}, 9, warm=2)
        return min(times["there"]) > 1.1 * min(times["here"])


def _serve(pipe: Connection) -> None:
    turns: dict[str, Turn] = {}
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if isinstance(asked, str):
            pipe.send(turns[asked]())
            continue
        threads, wanted = asked
        torch.set_num_threads(threads)
        turns = {}  # the old rings go before the new ones come
        turns = {name: turn_of(*ring) for name, ring in torch_calls(*wanted).items()}
        pipe.send(list(turns))


@contextmanager
def capped(variables: dict[str, str]) -> Iterator[Capped]:
    """Start a process with these variables, and end it."""
    before = dict(os.environ)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there,))
    try:
        os.environ.update(variables)
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    there.close()
    try:
        yield Capped(here)
    finally:
        here.close()
        process.join()
