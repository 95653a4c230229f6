"""Times on a CUDA device: what a graph's replay takes, how fast memory is read; exact attention.

Without a device works run as they are, so that a dry run can show that they run.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import runner
import torch
from torch import Tensor

Works = dict[str, Callable[[], Any]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 3
CACHE_BYTES = 2**28
"""More than any second-level cache holds."""


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays `work`, captured as one graph."""
    if DEVICE == "cpu":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        graph.replay()

    replay.work = work  # keeps alive what the graph reads
    return replay


def timed(work: Callable[[], Any]) -> float:
    """Return the microseconds of one call, between events where there is a device."""
    if DEVICE == "cpu":
        begun = perf_counter()
        work()
        return (perf_counter() - begun) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def microseconds(works: Works, rounds: int) -> dict[str, list[float]]:
    """Return the times of works that take turns; the second-level cache is flushed between them."""
    warm, flush = (WARM, CACHE_BYTES) if DEVICE == "cuda" else (0, 0)
    room = torch.empty(flush, dtype=torch.int8, device=DEVICE)

    def turn(work: Callable[[], Any]) -> float:
        room.zero_()
        return timed(work)

    return runner.in_turns(
        {name: partial(turn, work) for name, work in works.items()}, rounds, warm
    )


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = runner.quartiles(times)
    return {"us": middle, "low": low, "high": high}


def bandwidth(rounds: int) -> dict[str, float]:
    """Return how many bytes a second are copied (read and written) and read."""
    x = torch.empty(2**31 if DEVICE == "cuda" else 2**20, dtype=torch.uint8, device=DEVICE)
    y, words = torch.empty_like(x), x.view(torch.float32)
    works = {"copy": lambda: y.copy_(x), "read": lambda: torch.amax(words)}
    graphs = {name: captured(work) for name, work in works.items()}
    found = {name: summary(times)["us"] for name, times in microseconds(graphs, rounds).items()}
    return {"copy": 2 * x.numel() / found["copy"] * 1e6, "read": x.numel() / found["read"] * 1e6}


def forget() -> None:
    """Give free memory back, and count its peak anew."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks_of() -> dict[str, int]:
    """Return the most bytes that were allocated at a time, and what torch reserves; 0 on a CPU.

    What is reserved now, and at its peak, is what `nvidia-smi` shows: free blocks between those in
    use are among them.
    """
    cuda = torch.cuda if DEVICE == "cuda" else None
    return {
        "allocated": cuda.max_memory_allocated() if cuda else 0,
        "reserved": cuda.memory_reserved() if cuda else 0,
        "peak": cuda.max_memory_reserved() if cuda else 0,
    }


def exact_kernels(q: Tensor, k: Tensor, v: Tensor) -> Works:
    """Return kernels over `[B, H, T, D]` bf16 for one query a row: torch's and installed ones."""
    batch, heads, _, dim = k.shape
    groups = q.shape[1] // heads
    attend = torch.nn.functional.scaled_dot_product_attention
    rows = q.view(batch, heads, groups, dim)
    works: Works = {
        # A group's queries are the rows of one head: flash attention reads K and V once.
        "torch sdpa, flash": lambda: attend(rows, k, v),
        "torch matmul": lambda: torch.softmax(rows @ k.mT * dim**-0.5, -1) @ v,
    }
    if find_spec("flash_attn"):
        works["flash-attn"] = _flash(q, k, v)
    if find_spec("flashinfer"):
        works["FlashInfer"] = _flashinfer(q, k, v)
    if find_spec("vllm"):
        works["vLLM flash"] = _vllm(q, k, v)
    return works


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    from flash_attn import flash_attn_with_kvcache

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: flash_attn_with_kvcache(q, k, v)


def _pages(x: Tensor, size: int) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.transpose(1, 2).reshape(batch * tokens // size, size, heads, dim).contiguous()


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, size: int = 64) -> Callable[[], Any]:
    import flashinfer

    batch, heads, tokens, dim = k.shape
    pages, count = (_pages(k, size), _pages(v, size)), tokens // size
    room = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    ends = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device="cuda")
    table = torch.arange(batch * count, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), size, dtype=torch.int32, device="cuda")
    shape = (q.shape[1], heads, dim, size)
    decode.plan(ends, table, last, *shape, q_data_type=q.dtype)
    rows = q.squeeze(2).contiguous()
    return lambda: decode.run(rows, pages)


def _vllm(q: Tensor, k: Tensor, v: Tensor, size: int = 16) -> Callable[[], Any]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch, _, tokens, _ = k.shape
    table = torch.arange(batch * tokens // size, dtype=torch.int32, device="cuda").view(batch, -1)
    rows, keys, values = q.squeeze(2).contiguous(), _pages(k, size), _pages(v, size)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    used = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    return lambda: flash_attn_varlen_func(
        q=rows, k=keys, v=values, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=tokens,
        seqused_k=used, block_table=table, causal=True,
    )  # fmt: skip
