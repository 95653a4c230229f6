"""Builds of llama.cpp, of npm, of PyPI and from source: what loads kvpact, and what it saves.

    python tools/llama/packages.py FOLDER [--only WORD …] [--tokens N] [--rounds 2] [--write]

Packages are installed into FOLDER, where no compiler is needed. Each of their ggmls is tried; then
SmolLM2 reads 2,048 tokens and steps through 32 more with kvpact and without it, in turns, over a
cache of q8_0, on one thread: what is told is its time on the processor, of the quickest round. At
16 further places the next token's probabilities are compared. ``--write`` puts the rows into the
results from which docs/llama-cpp.md has its table. What a machine has no Node.js or no C library
for is named, and left out.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from kvpact.data import book_path
from kvpact.integrations.llama_cpp.backend import environment
from kvpact.integrations.llama_cpp.places import tried
from kvpact.integrations.llama_cpp.programs import COUNT, clean
from kvpact.integrations.models import SMOLLM2

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "llama" / "builds.json"
sys.path.insert(0, str(ROOT / "benchmarks"))
VERSIONS = {
    "node-llama-cpp": ("3.19.1", "3.20.0", "3.21.1", "3.22.1", ""),
    "xllamacpp": ("2026.4.8929", "2026.8.10566", "2026.10.11549", ""),
    "llama-cpp-py-sync": ("0.8606", "0.9554", "0.10603", "0.11413", "0.11739", ""),
}
"""What is tried of each package; "" is the newest."""
BUILT, SOURCE = "llama-cpp-python", "llama.cpp"
"""What builds.py has built beside FOLDER, if it has: the package, and the programs, whose libraries
the package opens in place of its own to be measured."""
STEPS, PLACES = 32, 16
FOUND = re.compile(r"ggml ([\d.]+), interface (\d+), trial NMSE (\S+)")


class Package(NamedTuple):
    """A version of a package."""

    name: str
    version: str

    @property
    def from_npm(self) -> bool:
        """Whether it is one for Node.js."""
        return self.name.startswith("node")

    def install(self, folder: Path) -> Path:
        """Return the folder that it is installed in, alone but for what it needs of npm."""
        if self.name == BUILT:
            (place,) = folder.parent.glob(f"{self.version}/venv/lib/*/site-packages/llama_cpp")
            return place
        if self.name == SOURCE:
            return folder.parent.joinpath(*self.version.split()) / "bin"
        place = folder / f"{self.name}-{self.version}"
        if place.is_dir():
            return place
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        if self.from_npm:
            (new / "package.json").write_text('{"type": "module", "private": true}')
            binaries = f"@node-llama-cpp/linux-x64@{self.version}"
            output("npm", "install", "--omit=optional", "--ignore-scripts", "--silent", "--prefix",
                   new, f"{self.name}@{self.version}", binaries)  # fmt: skip
        else:
            output(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", new,
                   f"{self.name}=={self.version}")  # fmt: skip
        return new.rename(place)

    def measure(self, place: Path, tokens: int, ours: bool, out: Path) -> dict[str, Any]:
        """Return what a run measured, with the attentions that were kvpact's."""
        words = [SMOLLM2.files()[0], book_path(), tokens, STEPS, PLACES, out]
        here = Path(__file__).parent
        if self.from_npm:
            variables = environment(every_program=False) | COUNT if ours else {}
            script = shutil.copy(here / "measure.mjs", place)
            told = output("node", script, *words, **variables)
            counted = re.search(r"^kvpact: computed (\d+)", told, re.M)
            return json.loads(out.read_text()) | {"attentions": int(counted[1]) if counted else 0}
        more = ["--kvpact"] if ours else []
        words, variables = [*words, *more], {"PYTHONPATH": str(place)}
        python, binding = sys.executable, self.name.replace("-", "_")
        if self.name in (BUILT, SOURCE):
            home = place.parents[3] if self.name == BUILT else place.parents[1] / "venv"
            python, binding = str(home / "bin" / "python"), "llama_cpp"
            variables = {"LLAMA_CPP_LIB_PATH": str(place)} if self.name == SOURCE else {}
        output(python, here / "measure.py", binding, *words, **variables)
        return dict(json.loads(out.read_text()))


def output(*words: object, **variables: str) -> str:
    """Return what a command prints; end with it where it fails."""
    print("+", *(x for x in words[:4]), "…", flush=True)
    done = subprocess.run(
        [*map(str, words)], env=clean(variables), stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stdout[-2000:])
    return done.stdout


def wanted(name: str, folder: Path) -> list[Package]:
    """Return the versions of a package, the newest by its number."""
    if name == BUILT:
        return [Package(name, x.parent.name) for x in sorted(folder.parent.glob("*/venv"))]
    if name == SOURCE:
        found = sorted(folder.parent.glob("*/*/bin/llama-bench"))
        return [Package(name, " ".join(x.parts[-4:-2])) for x in found]
    numbers = []
    for version in VERSIONS[name]:
        if not version and name.startswith("node"):
            version = output("npm", "view", name, "version").split()[-1]
        elif not version:
            told = output(sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "-qqq",
                          "--ignore-installed", "--report", "-", name)  # fmt: skip
            version = json.loads(told[told.index("{") :])["install"][0]["metadata"]["version"]
        numbers.append(version)
    return [Package(name, version) for version in dict.fromkeys(numbers)]


def divergence(own: list[list[float]], ours: list[list[float]]) -> float:
    """Return the mean KL of the next token, from the probabilities without kvpact."""
    found = []
    for p, q in zip(own, ours, strict=True):
        scale = sum(q) / sum(p)
        both = ((x, y) for x, y in zip(p, q, strict=True) if x > 0 and y > 0)
        found.append(sum(x * log(x / y * scale) for x, y in both) / sum(p))
    return fmean(found)


def row(package: Package, folder: Path, tokens: int, rounds: int) -> dict[str, Any] | None:
    """Return what a package's ggml is, whether it loads kvpact, and what that saves."""
    place = package.install(folder)
    (one,) = tried(str(place))
    if "GLIBC" in one.refused:
        print(f"left out: {package.name} {package.version}: {one.refused}", flush=True)
        return None
    found: dict[str, Any] = {"build": f"{package.name} {package.version}", "tokens": tokens}
    found["refused"] = one.refused
    if one.refused:
        return found
    version, interface, error = FOUND.fullmatch(one.found).groups()  # type: ignore[union-attr]
    found |= {"ggml": version, "interface": int(interface), "nmse": float(error)}
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        ours = turn % 2 == 1
        runs[ours].append(package.measure(place, tokens, ours, folder / "run.json"))
    for side, name in ((False, ""), (True, "kvpact_")):
        found[name + "prompt"] = min(x["prompt"] for x in runs[side])
        found[name + "step"] = min(median(x["steps"]) for x in runs[side])
    found["attentions"] = runs[True][0]["attentions"]
    found["kl"] = divergence(runs[False][0]["likely"], runs[True][0]["likely"])
    return found


def main() -> None:
    """Try all packages, and say what each does."""
    from machine import about

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="words of names and versions")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    before = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.is_file() else []
    rows = {(x["build"], x["tokens"]): x for x in before}
    for name in (*VERSIONS, BUILT, SOURCE):
        if name.startswith("node") and shutil.which("npm") is None:
            print(f"left out: {name}, since there is no npm")
            continue
        for package in wanted(name, folder):
            if not any(word in f"{package.name} {package.version}" for word in options.only):
                continue
            found = row(package, folder, options.tokens, options.rounds)
            if found is not None:
                rows[found["build"], options.tokens] = found
                print(json.dumps(found), flush=True)
            if options.write:
                told = about(threads=1, model="SmolLM2-135M Q4_1", cache="q8_0")
                RESULTS.parent.mkdir(exist_ok=True)
                text = json.dumps({"about": told, "rows": [*rows.values()]}, indent=1)
                RESULTS.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
