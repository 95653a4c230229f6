"""Run kvpact's tests of its integration beside other versions of transformers, and of the rest.

    python tools/versions.py [VERSION …] [--newest] [--jobs N] [--write]

Each version is installed into a folder of its own below ``build/versions``, with what it asks for
and without torch, and stands first on the path of its tests: the six families, the first programs
and the integration's. `newest` is what pip installs today. With --newest, the newest of everything
else in ``constraints.txt`` that kvpact needs to run stands beside it; torch stays as it is, unless
TORCH names another version. --write puts what was found into the table of ``docs/support.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/versions"
TABLE = ROOT / "docs/kvpact_pages/versions.json"
VERSIONS = ("4.57.6", "5.0.0", "5.5.4", "5.10.4", "5.15.1", "5.16.1", "5.17.0", "5.19.0", "5.20.0")
_SIX = "tests/integrations/test_families.py"
_README = "tests/docs/test_snippets.py::test_programs_of_the_readme_run_as_pasted"
_OTHERS = (_SIX, *(f"tests/integrations/{x}" for x in ("vllm", "lmcache", "sglang", "llama_cpp")))
TESTS = {
    "families": [_SIX],
    "programs": [_README, "tests/project/test_first_hour.py"],
    "integration": ["tests/integrations", *(f"--ignore={x}" for x in _OTHERS)],
}
# What runs beside transformers, and what kvpact's extras ask for.
RUN = ("accelerate", "cryptography", "filelock", "fsspec", "gguf", "huggingface_hub", "matplotlib",
       "numpy", "redis", "rich", "safetensors", "tokenizers", "typer")  # fmt: skip


def install(version: str, everything: bool) -> Path:
    """Install a version, if it is not there yet; the newest of all anew. Return the folder."""
    folder = FOLDER / (f"{version}-all" if everything else version)
    wanted = "transformers" if version == "newest" else f"transformers=={version}"
    if version == "newest":
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        return folder
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, "--target", str(scratch), wanted], check=True)
    if everything:  # none of these may bring torch
        more = [*pip, "--target", str(scratch), "--upgrade", "--no-deps", *RUN]
        if torch := os.environ.get("TORCH"):
            more.append(f"torch=={torch}")
        subprocess.run(more, check=True)
    scratch.rename(folder)
    return folder


def counted(report: Path) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def tested(folder: Path, jobs: int) -> dict[str, dict[str, int]]:
    """Run the tests beside what a folder has; return the counts of each kind."""
    fixed = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(folder)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
    pytest += ["-p", "no:cacheprovider"]
    found = {}
    for kind, given in TESTS.items():
        report = FOLDER / f"{folder.name}.{kind}.xml"
        report.unlink(missing_ok=True)
        words = [*pytest, f"--junitxml={report}", *given]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | fixed, capture_output=True, text=True
        )
        if done.returncode > 1 or not report.is_file():
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
        found[kind] = counted(report)
        if found[kind]["failed"]:
            print(done.stdout[-6000:])
    return found


def installed(folder: Path, name: str) -> str:
    """Return the version of a package in a folder."""
    return next(x.version for x in distributions(path=[str(folder)]) if x.name == name)


def write(version: str, found: dict[str, dict[str, int]]) -> None:
    """Put one version's row into the table, the newest last."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))
    rows = [row for row in rows if row["version"] != version] + [{"version": version, **found}]
    rows.sort(key=lambda row: [int(part) for part in row["version"].split(".")])
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    asked = options.versions or (["newest"] if options.newest else [*VERSIONS, "newest"])
    failed = False
    for version in asked:
        folder = install(version, options.newest)
        found = tested(folder, options.jobs)
        name = installed(folder, "transformers")
        failed |= any(kind["failed"] for kind in found.values())
        if options.write:
            write(name, found)
        counts = ", ".join(
            f"{kind} {n['passed']} passed, {n['failed']} failed, {n['skipped']} skipped"
            for kind, n in found.items()
        )
        print(f"transformers {name}: {counts}", flush=True)
    if options.newest:
        here = {x.name.lower(): x.version for x in distributions(path=[str(folder)])}
        pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
        for name, pin in sorted(pins.items()):
            if here.get(name.lower(), pin) != pin:
                print(f"{name} {here[name.lower()]} (constraints.txt has {pin})")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
