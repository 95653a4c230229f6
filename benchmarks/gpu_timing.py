"""Times on a CUDA device: what a graph's replay takes, and how fast memory is read.

Without a device works run as they are, so that a dry run can show that they run.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import runner
import torch

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


def microseconds(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
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
