"""Memory of a process in which caches come, go, grow, are saved and restored, as the kernel counts.

    python benchmarks/long_lived.py [--model smollm2] [--spec trellis:bits=4] [--only NAME …] …

Each scenario runs in a process of its own, on two threads if it says nothing else. All sizes are in
MiB over what was resident before the scenario began (VmRSS and VmHWM, Linux), when the model was
loaded and had generated two tokens; *cache* is what the cache's own account says at the end.
Nothing is given back to the system before it is read. *Copies* are of the cache, over what was
resident before that work, which had been done with a short cache before.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import children
import runner
import torch

from kvpact import CacheGeometry, PagedKVCache, Snapshot, disable, enable
from kvpact.evaluate import evaluate
from kvpact.integrations.transformers import CompressedCache, PagedBatch, prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import giving_back
from kvpact.stores import open_store

MIB, FOUR = 1 << 20, "turboquant:bits=4"
Sizes = dict[str, float]


class World:
    """A model, the tokens of a book, and what was resident when a scenario began."""

    def __init__(self, name: str, spec: str) -> None:
        torch.set_num_threads(2)
        self.name, self.spec = name, spec
        self.model, self.ids = runner.book(name, 8192)
        self.generate(self.ids[:, :64], 2)
        self.start = children.peak_start()

    def generate(self, ids: torch.Tensor, new: int, **given: Any) -> Any:
        """Generate greedily."""
        fixed = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new}
        return self.model.generate(ids, max_new_tokens=new, **fixed, **given)

    def over(self) -> float:
        """Return what is resident beyond the start."""
        return (children.resident() - self.start) / MIB

    def copies(self, work: Callable[[], Any], cache: CompressedCache) -> float:
        """Return the peak of some work in copies of a cache."""
        start = children.peak_start()
        work()
        return children.peak_over(start) / cache.nbytes

    def sizes(self, cache: float = 0.0) -> Sizes:
        """Return peak and what is there now, and a cache's bytes."""
        peak = children.peak_over(self.start) / MIB
        return {"cache": cache / MIB, "peak": peak, "after": self.over()}


def chat(world: World) -> Sizes:
    """20 turns of 200 tokens and 24 of an answer on one cache."""
    cache, ids = CompressedCache(world.model, world.spec), world.ids[:, :0]
    for turn in range(20):
        ids = torch.cat([ids, world.ids[:, 200 * turn : 200 * turn + 200]], 1)
        ids = world.generate(ids, 24, **named(cache))
    return world.sizes(cache.nbytes)


def server(world: World) -> Sizes:
    """100 conversations of 500 to 1,000 tokens, one after the other, with `enable`."""
    enable(world.model, world.spec)
    found = []
    for turn in range(100):
        world.generate(world.ids[:, turn : turn + 500 + 5 * turn], 4)
        found.append(world.over())
    disable(world.model)
    return world.sizes() | {"after 10": found[9], "after 100": found[-1]}


def together(world: World) -> Sizes:
    """80 conversations of 400 tokens with `enable`, 8 at a time in threads."""
    enable(world.model, world.spec)
    found = []
    for _ in range(10):
        ids = world.ids[:, :400]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(world.generate, [ids] * 8, [4] * 8))
        found.append(world.over())
    disable(world.model)
    return world.sizes() | {"after 16": found[1], "after 80": found[-1]}


def evaluation(world: World) -> Sizes:
    """`evaluate` on 8,000 tokens in chunks of 512, beside an exact cache."""
    evaluate(world.model, world.ids[0, :8000], [world.spec], chunk=512)
    return world.sizes()


def snapshot(world: World) -> Sizes:
    """A snapshot of 4,000 tokens made, written and restored: peaks in copies of the cache."""
    found: Sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kvpact"
        for tokens in (200, 4000):
            cache = CompressedCache(world.model, world.spec)
            world.generate(world.ids[:, :tokens], 2, **named(cache))
            for name, work in {
                "made": lambda cache: cache.snapshot().save(path),
                "restored": lambda cache: cache.restore(Snapshot.open(path)),
                "loaded, restored": lambda cache: cache.restore(Snapshot.load(path)),
            }.items():
                found[f"{name}, copies"] = world.copies(partial(work, cache), cache)
    return world.sizes(cache.nbytes) | found


def prefixed(world: World, folder: str, load: bool) -> Sizes:
    """Return the peak of a prefix saved, behind its prompt, or loaded, in copies of the cache."""
    found: Sizes = {}
    with open_store(folder) as store:
        for tokens in (192, 3968):
            cache, ids = CompressedCache(world.model, FOUR), world.ids[:, :tokens]
            with giving_back() if load else nullcontext():  # the fingerprint read all weights
                prefixes = prefix_cache(store, world.model, cache)
            if not load:
                with torch.no_grad():
                    runner.forward(world.model, ids, cache)
            work = partial(prefixes.load if load else prefixes.save, ids)
            found["loaded, copies" if load else "saved, copies"] = world.copies(work, cache)
        return world.sizes(cache.nbytes) | found


def saved(world: World, folder: str | None = None) -> Sizes:
    """A prefix of 4,000 tokens computed, and saved: the peak of that in copies of the cache."""
    with tempfile.TemporaryDirectory() as other:
        return prefixed(world, folder or other, False)


def prefix(world: World) -> Sizes:
    """That prefix loaded by another process: the peak in copies of the cache."""
    with tempfile.TemporaryDirectory() as folder:
        children.asked(__file__, ["saved", world.name, world.spec, folder])
        return prefixed(world, folder, True)


def budget(world: World) -> Sizes:
    """4,000 tokens in chunks of 64 within 24 MB, on one thread."""
    torch.set_num_threads(1)  # two wait for each other at every operation of so few tokens
    cache = CompressedCache(world.model, budget="24MB")
    world.generate(world.ids[:, :4000], 16, prefill_chunk_size=64, **named(cache))
    return world.sizes(cache.nbytes)


def pages(world: World) -> Sizes:
    """Pages for 4,096 tokens, a prompt of 4,000 and 16 steps in them."""
    config, shape = world.model.config, CacheGeometry.from_config(world.model.config)
    pool = PagedKVCache(FOUR, shape, num_pages=64, page_size=64)
    batch = PagedBatch(config, pool, [pool.allocate()])
    world.model.set_attn_implementation("kvpact")
    with torch.no_grad():
        for ids in (world.ids[:, :4000], *world.ids[:, 4000:4016].split(1, 1)):
            runner.forward(world.model, ids, batch)
    return world.sizes(pool.memory_usage())


def batch(world: World) -> Sizes:
    """8 rows of 1,000 tokens."""
    cache = CompressedCache(world.model, world.spec)
    world.generate(world.ids[0, :8000].view(8, 1000), 16, **named(cache))
    return world.sizes(cache.nbytes)


def beams(world: World) -> Sizes:
    """4 beams behind a prompt of 2,000 tokens."""
    cache = CompressedCache(world.model, world.spec)
    world.generate(world.ids[:, :2000], 32, **named(cache), num_beams=4)
    return world.sizes(cache.nbytes)


DONE = (chat, server, together, evaluation, snapshot, saved, prefix, budget, pages, batch, beams)
SCENARIOS: dict[str, Callable[..., Sizes]] = {each.__name__: each for each in DONE}


def main() -> None:
    if children.answer(lambda name, *given: SCENARIOS[name](World(*given[:2]), *given[2:])):
        return
    given = {"model": "smollm2", "spec": "trellis:bits=4", "only": SCENARIOS, "runs": 3}
    options = runner.arguments(__doc__, **given)
    rows, cells = [], []
    for name in options.only:
        work = [name, options.model, options.spec]
        runs = [children.asked(__file__, work) for _ in range(options.runs)]
        row = runner.medians({key: [each[key] for each in runs] for key in runs[0]}, 1)
        rows.append({"scenario": name, "what": SCENARIOS[name].__doc__, **row})
        sizes = (f"{key} {value:.1f}" for key, value in row.items())
        cells.append([rows[-1]["what"], ", ".join(sizes)])
    body = runner.table("scenario | MiB, or copies", cells, 2)
    runner.report(options, "long_lived", rows, body, ("model", "spec", "runs"))


if __name__ == "__main__":
    main()
