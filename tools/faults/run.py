"""Tells which tests catch which faults: a net for changes that move much of the code.

`faults.toml` lists small mistakes that somebody could make in `src/kvpact`. Each one is made in a
copy of the package below a temporary folder, and the tests named beside it run on that copy; for a
mistake in C++ the copy's native library is compiled, for this machine's instruction set alone. The
working tree is never written to: nothing has to be restored, whatever ends this program.

A fault is *caught* by the first test that fails; at the end these tests run once more without any
fault, and what fails even then is told. One is *missed* if all tests pass, and *unfinished* if they
took longer than the limit. The exit status is 0 if all were caught, 1 if not, and 2 where the list
does not fit the sources.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "kvpact"
PYTEST = ("-m", "pytest", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider")
LIBRARY = "kvpact_cpu"
LONGEST = 200
"""Characters of a test's id."""
NO_TESTS = 5
"""Exit status of pytest where it collected none."""

# What the interpreter loads at its start, in the tests' own processes, too: `kvpact` comes from the
# copy, although the environment's finder knows the sources by their paths.
START = """
import sys
from importlib.machinery import PathFinder

class Copy:
    def find_spec(name, path=None, target=None):
        if name == "kvpact" or name.startswith("kvpact."):
            return PathFinder.find_spec(name, path or [{folder!r}])

sys.meta_path.insert(0, Copy)
"""

# Writes down the tests that failed, and the one that runs.
PLUGIN = """
import os

def note(name, mode, text):
    with open(os.path.join({folder!r}, name), mode, encoding="utf-8") as file:
        file.write(text)

def pytest_runtest_logstart(nodeid):
    note("running", "w", nodeid)

def pytest_runtest_logreport(report):
    if report.failed:
        note("failed", "a", report.nodeid + "\\n")

def pytest_collectreport(report):
    if report.failed:
        note("failed", "a", report.nodeid + "\\n")
"""


class Fault(NamedTuple):
    """A mistake: what stands in a file of the package, and what is put in its place."""

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """What became of a fault: caught, missed or unfinished, in which test, in how many seconds."""

    what: str
    test: str
    seconds: float


def read_faults(path: Path) -> list[Fault]:
    """Return the faults of a list."""
    with path.open("rb") as file:
        listed = tomllib.load(file)["fault"]
    return [Fault(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def errors(faults: list[Fault]) -> list[str]:
    """Return what keeps a list from fitting the sources."""
    found, names = [], [fault.name for fault in faults]
    found += [f"{name}: two faults have this name" for name in set(names) if names.count(name) > 1]
    for name, file, text, replacement, tests in faults:
        path = PACKAGE / file
        count = path.read_text("utf-8").count(text) if path.is_file() else 0
        if not path.is_file():
            found.append(f"{name}: there is no file {file}")
        elif count != 1:
            found.append(f"{name}: its text is in {file} {count} times, not once")
        elif text == replacement:
            found.append(f"{name}: it changes nothing")
        elif path.suffix == ".py":
            try:
                compile(path.read_text("utf-8").replace(text, replacement), file, "exec")
            except SyntaxError as error:
                found.append(f"{name}: {file} can't be compiled any more: {error}")
        gone = [test for test in tests if not (ROOT / test.partition("::")[0]).exists()]
        found += [f"{name}: there is no {test}" for test in gone]
        if not tests:
            found.append(f"{name}: it names no tests")
    return found


def short(test: str) -> str:
    """Return the id of a test; where its parameters are long, as tensors are, without them."""
    return test if len(test) <= LONGEST else test.partition("[")[0]


class Scratch:
    """A copy of the package in a temporary folder, where tests run on it.

    Parameters
    ----------
    folder : Path
        Empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._package = folder, folder / "src" / "kvpact"
        for place in self._places():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(place, self._package, ignore=leave, dirs_exist_ok=True)
        hooks = folder / "hooks"
        hooks.mkdir()
        start = START.format(folder=str(self._package.parent))
        (hooks / "sitecustomize.py").write_text(start, "utf-8")
        (hooks / "kvpact_faults.py").write_text(PLUGIN.format(folder=str(folder)), "utf-8")
        others = os.environ.get("PYTHONPATH")
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(hooks), *([others] if others else [])]),
            # Examples that failed because of a fault are none of the working tree's.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        if self._python("import kvpact; print(kvpact.__file__)") != str(
            self._package / "__init__.py"
        ):
            raise RuntimeError("the tests would not run on the copy of the package")

    def _places(self) -> list[str]:
        """Return the folders of the package: sources, and what was built from them."""
        self._environment = dict(os.environ)
        told = self._python("import kvpact; print(*kvpact.__path__, sep='\\n')").splitlines()
        if str(PACKAGE) not in told:
            raise RuntimeError(f"{sys.executable} imports kvpact from {told}, not from {PACKAGE}")
        return [*(place for place in told if place != str(PACKAGE)), str(PACKAGE)]

    def _python(self, code: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=self._environment, cwd=self._folder, stdout=subprocess.PIPE, text=True
        )
        done.check_returncode()
        return done.stdout.strip()

    def write(self, file: str, text: str) -> None:
        """Write a file of the copy; no compiled file of another content is left."""
        path = self._package / file
        path.write_text(text, "utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def _built(self) -> Path:
        """Compile the copy's native library, what changed of it, and return where it lies."""
        build = self._folder / "build"
        if not build.exists():
            shutil.copy(ROOT / "CMakeLists.txt", self._folder)
            self._make("-S", self._folder, "-B", build, "-DKVP_LEVELS=native")
        self._make("--build", build, "--target", LIBRARY, "--parallel", os.cpu_count() or 1)
        return build / f"lib{LIBRARY}.so"

    def _make(self, *words: object) -> None:
        done = subprocess.run(["cmake", *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the copy can't be compiled:\n{done.stdout}{done.stderr}")

    @contextmanager
    def _with(self, fault: Fault) -> Iterator[None]:
        """Make a mistake in the copy, and take it back."""
        source = (PACKAGE / fault.file).read_text("utf-8")
        library = self._package / "kernels" / "cpu" / f"lib{LIBRARY}.so"
        kept = None if fault.file.endswith(".py") else library.read_bytes()
        try:
            self.write(fault.file, source.replace(fault.text, fault.replacement))
            if kept:
                shutil.copy(self._built(), library)
            yield
        finally:
            self.write(fault.file, source)
            if kept:
                library.write_bytes(kept)

    def run(self, tests: tuple[str, ...], limit: float, first: bool = True) -> tuple[int, str]:
        """Run tests, the `first` failure ends it; return pytest's exit status and its output.

        Raises
        ------
        subprocess.TimeoutExpired
            They took longer than `limit` seconds.
        """
        for name in ("failed", "running"):
            (self._folder / name).unlink(missing_ok=True)
        more = ["-x"] if first else []
        command = [sys.executable, *PYTEST, "-p", "kvpact_faults", *more, *tests]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            finally:  # processes that tests started, too; there may be none any more
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def noted(self, name: str) -> list[str]:
        """Return which tests ``failed``, or which is ``running``."""
        path = self._folder / name
        return path.read_text("utf-8").splitlines() if path.exists() else []

    def outcome(self, fault: Fault, tests: tuple[str, ...], limit: float) -> Outcome:
        """Run tests with a fault."""
        started = time.monotonic()
        with self._with(fault):
            try:
                status, output = self.run(tests, limit)
            except subprocess.TimeoutExpired:
                running = (self.noted("running") or ["before the first test"])[0]
                return Outcome("unfinished", running, time.monotonic() - started)
        seconds = time.monotonic() - started
        if status == 0:
            return Outcome("missed", "", seconds)
        failed = self.noted("failed")
        if status < 0 and not failed:  # a fault can end the interpreter
            failed = self.noted("running")
        if status == NO_TESTS or not failed:
            raise RuntimeError(f"{fault.name}: pytest ended with status {status}:\n{output}")
        return Outcome("caught", short(failed[0]), seconds)

    def failing(self, tests: list[str], limit: float) -> list[str]:
        """Return those of some tests that fail without a fault."""
        status, output = self.run(tuple(tests), limit, first=False)
        failed = self.noted("failed")
        if status and not failed:
            raise RuntimeError(f"without a fault pytest ended with status {status}:\n{output}")
        return failed


def write_outcomes(path: Path, listed: list[Fault], outcomes: dict[str, Outcome]) -> None:
    """Write a JSON of fault -> first failing test; what it says of other faults listed stays."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    known |= {name: x.test if x.what == "caught" else x.what for name, x in outcomes.items()}
    kept = {fault.name: known[fault.name] for fault in listed if fault.name in known}
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def main() -> int:
    """Run the tests of each fault and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="in place of those of the list")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a fault's tests")
    parser.add_argument(
        "--out", type=Path, help="a JSON of fault -> first failing test to be written"
    )
    given = parser.parse_args()
    listed = faults = read_faults(HERE / "faults.toml")
    unknown = set(given.only or ()) - {fault.name for fault in faults}
    if given.only:
        faults = [fault for fault in faults if fault.name in given.only]
    wrong = [f"{name}: there is no such fault" for name in sorted(unknown)] + errors(faults)
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="kvpact-faults-", ignore_cleanup_errors=True) as folder:
        scratch = Scratch(Path(folder).resolve())
        width = max(len(fault.name) for fault in faults)
        for fault in faults:
            tests = tuple(given.tests or fault.tests)
            what, test, seconds = scratch.outcome(fault, tests, given.limit)
            outcomes[fault.name] = Outcome(what, test, seconds)
            print(f"{fault.name:{width}}  {what:10}  {seconds:5.0f} s  {test}", flush=True)
        caught = sorted({test for what, test, _ in outcomes.values() if what == "caught"})
        bad = scratch.failing(caught, given.limit * len(caught)) if caught else []
    for test in bad:
        print(f"{test} fails without a fault, too", file=sys.stderr)
    counts = [sum(x.what == what for x in outcomes.values()) for what in ("caught", "missed")]
    print(f"{counts[0]} of {len(faults)} faults are caught, {counts[1]} missed")
    if given.out:
        write_outcomes(given.out, listed, outcomes)
    return int(bool(bad) or counts[0] < len(faults))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
