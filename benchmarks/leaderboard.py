"""Caches of kvpact and of other packages on the same work: KL, bytes held, time.

    python benchmarks/leaderboard.py [--only NAME …] [--models smollm2 gemma3] [--tokens 768] …

Each contender (`leaderboard_peers`, or an entry point in the group ``kvpact.leaderboard``) is
installed into a folder of its own and measured in a process of its own, on one thread, beside
transformers' `DynamicCache`; what was found is written to DIR/NAME.json, of which
`python docs/generate.py` makes docs/leaderboard.md. `--together` measures in one process, all
taking turns, which takes a third of the time: for packages that have no modules of the same name.

KL is that of `kvpact eval`: a book's first tokens in chunks of 256, the first one not scored. Time
and bytes are those of a decode step after as many random tokens as a context has, less the last 64.
Bytes are those of all tensors that the cache object holds, found by walking it. Times are ratios of
the process' seconds on the CPU: cache and DynamicCache take turns, prompt by prompt and step by
step. A prompt of --prompt tokens is one call on an empty cache.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import children
import runner
import transformers
from leaderboard_contenders import contender, installed, points
from leaderboard_process import carried_out

import kvpact
from kvpact.data import book_path

RESULTS = Path(__file__).parent / "results" / "leaderboard"
CHUNK = 256


def in_process(order: dict[str, object], places: list[Path]) -> dict[str, dict[str, object]]:
    """Measure in a new process that finds packages in `places`; return what it found of each.

    That is nothing where the process ends before it has found something; it says why.
    """
    try:
        return children.asked(__file__, order, places=places)
    except children.Ended as error:
        print(error, file=sys.stderr)
        return {}


def run(options: argparse.Namespace) -> list[str]:
    """Measure every contender on every model, and write a file for each; return who has none."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    names = ("tokens", "prompt", "contexts", "rounds")
    sizes = {name: getattr(options, name) for name in names} | {"chunk": CHUNK, "threads": 1}
    versions = {"kvpact": kvpact.__version__, "transformers": transformers.__version__}
    ended, chosen = [], options.only
    for group in [chosen] if options.together else [[name] for name in chosen]:
        known = {name: contender(name) for name in group}
        installs = [installed(name, one.requires) for name, one in known.items()]
        print(f"{', '.join(group)} …", flush=True)
        load = options.about | versions | {"text": book_path().name, "run": now, **sizes}
        order = {"names": group, "models": options.models, **sizes}
        got = in_process(order, [place for place in installs if place])
        ended += [name for name in group if name not in got]
        for name in got:
            one = known[name]
            found = {"package": one.package, "changed": one.changed, "note": one.note}
            options.out.mkdir(parents=True, exist_ok=True)
            found |= got[name] | {"about": load | {"beside": group}}
            text = json.dumps(found, indent=1)
            (options.out / f"{name}.json").write_text(f"{text}\n", "utf-8")
    return ended


def main() -> None:
    """Measure and write."""
    if children.answer(carried_out):
        return
    options = runner.arguments(
        __doc__, only=dict(points()), models=["smollm2", "gemma3"], tokens=768, prompt=1024,
        contexts=[1024, 4096, 8000], rounds=5, together=False, out=RESULTS,
    )  # fmt: skip
    ended = run(options)
    if ended:
        raise SystemExit(f"not written, because a process ended (see above): {', '.join(ended)}")
    print(f"written to {options.out}; python docs/generate.py makes the page")


if __name__ == "__main__":
    main()
