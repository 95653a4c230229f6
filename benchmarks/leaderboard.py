"""Caches of kvpact and of other packages on the same work: KL, bytes held, time.

    python benchmarks/leaderboard.py [--only NAME …] [--models smollm2 gemma3] [--tokens 768]
        [--prompt 1024] [--contexts 1024 4096 8000] [--rounds 5] [--together] [--out DIR]

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

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import transformers
from leaderboard_contenders import contender, installed, points
from machine import about

import kvpact
from kvpact.data import book_path

RESULTS = Path(__file__).parent / "results" / "leaderboard"
CHUNK = 256


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(points()), metavar="NAME")
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def in_process(
    order: dict[str, object], places: list[Path], folder: Path
) -> dict[str, dict[str, object]]:
    """Measure in a new process that finds packages in `places`; return what it found of each.

    That is nothing where the process ends before it has found something; it has said why.
    """
    what, found = folder / "order.json", folder / "found.json"
    what.write_text(json.dumps(order), "utf-8")
    found.unlink(missing_ok=True)
    script = Path(__file__).parent / "leaderboard_process.py"
    environment = dict(os.environ)
    # In front of what is installed beside kvpact, programs too.
    for name, more in {"PYTHONPATH": places, "PATH": [each / "bin" for each in places]}.items():
        parts = [*map(str, more), *filter(None, [os.environ.get(name)])]
        environment[name] = os.pathsep.join(parts)
    command = [sys.executable, str(script), str(what), str(found)]
    if subprocess.run(command, env=environment).returncode:
        return {}
    return json.loads(found.read_text("utf-8"))


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure every contender on every model, and write a file for each; return who has none."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    names = ("tokens", "prompt", "contexts", "rounds")
    sizes = {name: getattr(options, name) for name in names} | {"chunk": CHUNK, "threads": 1}
    versions = {"kvpact": kvpact.__version__, "transformers": transformers.__version__}
    chosen = options.only or list(points())
    ended = []
    for group in [chosen] if options.together else [[name] for name in chosen]:
        known = {name: contender(name) for name in group}
        installs = [installed(name, one.requires) for name, one in known.items()]
        print(f"{', '.join(group)} …", flush=True)
        load = about(**versions, text=book_path().name, run=now, **sizes, beside=group)
        order = {"names": group, "models": options.models, **sizes}
        got = in_process(order, [place for place in installs if place], folder)
        ended += [name for name in group if name not in got]
        for name in got:
            one = known[name]
            found = {"package": one.package, "changed": one.changed, "note": one.note}
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{name}.json"
            path.write_text(
                json.dumps(found | got[name] | {"about": load}, indent=1) + "\n", "utf-8"
            )
    return ended


def main() -> None:
    """Measure and write."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        ended = run(options, Path(folder))
    if ended:
        raise SystemExit(f"not written, because a process ended (see above): {', '.join(ended)}")
    print(f"written to {options.out}; python docs/generate.py makes the page")


if __name__ == "__main__":
    main()
