"""Memory that a process takes for a cache, as the kernel counts it, beside DynamicCache's.

    python benchmarks/process.py [--models smollm2 gemma3] [--dtypes float32 bfloat16] …

Each cache gets a process of its own, which loads the model, generates two tokens, and then
generates --steps tokens behind a prompt of --tokens, in one piece (0) or in chunks. *Cache* is what
its tensors take; *peak* and *after* are how much more than before the prompt was resident, at any
time and at the end (VmHWM and VmRSS of /proc/self/status, Linux). Nothing is given back to the
system before it is read. Medians of the runs, which take turns. With --peers the caches of the
leaderboard's other packages, which are installed into folders of their own, stand beside.
"""

import itertools
import sys
from functools import partial
from typing import Any

import children
import runner
import torch
from leaderboard_bytes import held_bytes
from leaderboard_contenders import contender, installed, points
from transformers import DynamicCache

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

EXACT, MIB = "DynamicCache", 1 << 20
SPECS = ["trellis:bits=4", "turboquant:bits=4", "int:bits=8", "none"]
SIZES = ("cache", "peak", "after")


def made(spec: str, model: Any) -> Any:
    """Return an empty cache: of a spec of kvpact's, or the cache NAME of a PEER as "PEER: NAME"."""
    if spec == EXACT:
        return DynamicCache(config=model.config)
    peer, other, name = spec.partition(": ")
    if other:
        return contender(peer).caches[name](model)
    return CompressedCache(model, spec)


def measure(
    model: str, dtype: str, threads: int, tokens: int, chunk: int, spec: str, steps: int
) -> dict[str, int]:
    """Return bytes: of the cache, and at the peak and afterwards of the process over the start."""
    torch.set_num_threads(threads)
    network, ids = runner.book(model, tokens, dtype=getattr(torch, dtype))
    greedy = {"do_sample": False, "pad_token_id": 0}
    network.generate(ids[:, :64], max_new_tokens=2, **greedy)  # libraries load, threads start
    cache = made(spec, network)
    given = {"prefill_chunk_size": chunk} if chunk else {}
    given |= {"min_new_tokens": steps, "max_new_tokens": steps}
    before = children.peak_start()
    network.generate(ids, **named(cache), **greedy, **given)
    peak = children.peak_over(before)
    return {"cache": held_bytes(cache), "peak": peak, "after": children.resident() - before}


def run(case: runner.Row) -> dict[str, int]:
    """Measure one case in a new process, under no policy of threads but the user's.

    Returns nothing where the process ends before it has measured, as some peers' does.
    """
    peer, other, _ = case["spec"].partition(": ")
    place = installed(peer, contender(peer).requires) if other else None
    options = {"environment": {"OMP_WAIT_POLICY": None}, "places": [place] if place else []}
    try:
        return children.asked(__file__, case, **options)
    except children.Ended as error:
        print(f"{case['spec']}: {error}", file=sys.stderr)
        return {}


def rows_of(options: runner.Options, work: runner.Row) -> list[runner.Row]:
    """Return a row of each cache on one piece of work; the caches take turns."""
    peers = [name for name in points() if name != "own"] if options.peers else []
    specs = [EXACT, *options.specs]
    specs += [f"{name}: {cache}" for name in peers for cache in contender(name).caches]
    turns = {spec: partial(run, work | {"spec": spec, "steps": options.steps}) for spec in specs}
    rows = []
    for spec, runs in runner.in_turns(turns, options.runs, warm=0).items():
        if all(runs):  # or it was said why not
            found = {name: sorted(each[name] for each in runs) for name in SIZES}
            ends = {f"{name}_spread": x[:: len(x) - 1 or 1] for name, x in found.items()}
            rows.append(work | {"spec": spec} | runner.medians(found, 1) | ends)
    return rows


def main() -> None:
    if children.answer(measure):
        return
    options = runner.arguments(
        __doc__, models=["smollm2", "gemma3"], dtypes=["float32", "bfloat16"], threads=[1, 2],
        tokens=[32, 128, 512, 1000, 4000, 8000], chunks=[0, 512], specs=SPECS, peers=False, runs=5,
        steps=64,
    )  # fmt: skip
    columns = "model | dtype | threads | prompt | in | cache | holds, MiB | peak | after"
    rows: list[runner.Row] = []
    axes = options.models, options.dtypes, options.threads, options.tokens, options.chunks
    works = [work for work in itertools.product(*axes) if work[-1] < work[-2]]
    for number, work in enumerate(works, 1):
        names = ("model", "dtype", "threads", "tokens", "chunk")
        rows += rows_of(options, dict(zip(names, work, strict=True)))
        cells = []
        for r in rows:
            place = r["model"], r["dtype"], r["threads"], f"{r['tokens']:,}"
            sizes = (f"{r[name] / MIB:.0f}" for name in SIZES)
            cells.append([*place, r["chunk"] or "one piece", r["spec"], *sizes])
        body, told = runner.table(columns, cells, 2), ("steps", "runs")
        runner.report(options, "process", rows, body, told, last=number == len(works))


if __name__ == "__main__":
    main()
