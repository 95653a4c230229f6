"""Times on a CUDA device: what a graph's replay takes, and how fast memory is read.

Without a device works run as they are, so that a dry run can show that they run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

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
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + warm):
        for name, work in works.items():
            room.zero_()
            found = timed(work)
            if turn >= warm:
                times[name].append(found)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    if len(times) == 1:
        times = times * 2
    low, middle, high = statistics.quantiles(times, n=4)
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


def peak_memory() -> int:
    """Return the most bytes that were allocated at a time; 0 without a device."""
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def reserved_memory() -> tuple[int, int]:
    """Return the bytes that torch holds of the device now, and the most of them; 0 without one.

    What `nvidia-smi` shows: free blocks between those in use are among them.
    """
    if DEVICE != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
