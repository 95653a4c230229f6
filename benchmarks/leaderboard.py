"""Caches of kvpact and of other packages on the same work: KL, bytes held, time.

    python benchmarks/leaderboard.py [--only NAME …] [--models smollm2 gemma3] [--tokens 2305] …

Each contender (`leaderboard_contenders`, or an entry point in the group ``kvpact.leaderboard``) is
installed into a folder of its own and measured in a process of its own, on one thread, beside
transformers' `DynamicCache`; what was found is written to DIR/NAME.json, of which
`python docs/generate.py` makes docs/leaderboard.md.

KL is that of `kvpact eval`: 2,048 scored tokens of a book, in chunks of 256. Time
and bytes are those of a decode step after as many random tokens as a context has, less the last 64.
Bytes are those of all tensors that the cache object holds, found by walking it. Times are ratios of
the process' seconds on the CPU: cache and DynamicCache take turns, prompt by prompt and step by
step. A prompt of --prompt tokens is one call on an empty cache.
"""

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


def main() -> None:
    if children.answer(carried_out):
        return
    options = runner.arguments(
        __doc__, only=dict(points()), models=["smollm2", "gemma3"], tokens=2305, prompt=1024,
        contexts=[1024, 4096, 8000], rounds=5, out=RESULTS,
    )  # fmt: skip
    names = ("tokens", "prompt", "contexts", "rounds")
    sizes = {name: getattr(options, name) for name in names} | {"chunk": CHUNK, "threads": 1}
    versions = {"kvpact": kvpact.__version__, "transformers": transformers.__version__}
    now = datetime.now(UTC).isoformat(timespec="minutes")
    about = options.about | versions | {"text": book_path().name, "run": now, **sizes}
    ended = []
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        print(f"{name} …", flush=True)
        one = contender(name)
        place = installed(name, one.requires)
        order = {"names": [name], "models": options.models, **sizes}
        try:
            got = children.asked(__file__, order, places=[place] if place else [])[name]
        except children.Ended as error:
            print(error, file=sys.stderr)
            ended.append(name)
            continue
        found = {"package": one.package, "changed": one.changed, "note": one.note, **got}
        text = json.dumps(found | {"about": about}, indent=1)
        (options.out / f"{name}.json").write_text(f"{text}\n", "utf-8")
    if ended:
        raise SystemExit(f"not written, because a process ended (see above): {', '.join(ended)}")
    print(f"written to {options.out}; python docs/generate.py makes the page")


if __name__ == "__main__":
    main()
