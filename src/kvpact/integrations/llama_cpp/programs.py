"""Programs of a user's own build of llama.cpp, run with the backend and without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, NamedTuple

from kvpact.errors import BackendUnavailable, KVPactError
from kvpact.integrations.llama_cpp.backend import DEVICE, environment, library

LOADERS = ("llama-server", "llama-cli", "llama-completion", "llama-perplexity")
"""Programs that may or may not read ``GGML_BACKEND_PATH`` when they start."""
PROGRAMS = ("llama-bench", "test-backend-ops", *LOADERS)
F16 = {"KVPACT_GGML_F16": "1"}
"""Has the backend take caches of f16, too, which is for programs with ``-fa on`` alone."""
ALL_CASES = {"KVPACT_GGML_ALL": "1", **F16}
"""Has it take whatever it can compute, not what it makes quicker alone."""
COUNT = {"KVPACT_GGML_COUNT": "1"}
"""Has it print the number of attentions that it computed when a program ends."""
LINKER = {"LD_DEBUG": "files", "DYLD_PRINT_LIBRARIES": "1"}
"""Has the dynamic linkers of Linux and of macOS print the libraries that a program loads."""
RESULT = re.compile(r"(OK|FAIL|not supported)\b")
COLOUR = re.compile(r"\x1b\[[\d;]*m")

START, LIMIT = 120.0, 1800.0
"""Seconds that a program may take to say what it loads, and to measure something."""

Report = Callable[[float, float | None, str], None]


class Ops(NamedTuple):
    """Operations that were compared with those of ggml's own backend for CPUs."""

    passed: int
    failed: int
    left: int  # to ggml, because the backend does not support them


class Timing(NamedTuple):
    """A measurement of ``llama-bench``, with the backend or without it."""

    ms: float  # per token
    attentions: int  # that kvpact computed
    loaded: bool


def programs(path: Path) -> dict[str, Path]:
    """Return the programs of a build by name; `path` is one of them, or a folder of the build."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, folder / "bin", folder / "build" / "bin"):
        if found := {name: place / name for name in PROGRAMS if (place / name).is_file()}:
            return found
    return {}


def run(
    program: Path, words: Iterable[object], variables: dict[str, str], limit: float = START
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with no more backends than `variables` name.

    Raises `KVPactError`, and ends it, where it takes more than `limit` seconds.
    """
    try:
        return subprocess.run(
            [str(program), *map(str, words)], env=clean(variables), capture_output=True,
            encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _late(program, limit) from None


def _late(program: Path, limit: float) -> KVPactError:
    more = "" if limit == START else "; --limit allows it more"
    return KVPactError(f"{program} was ended, because it took over {limit:g} seconds{more}")


def clean(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without a backend, and with `variables`."""
    ours = ("GGML_BACKEND_PATH", *environment(), *ALL_CASES, *COUNT)
    return {name: x for name, x in os.environ.items() if name not in ours} | variables


def listed(text: str) -> list[str]:
    """Return the devices that ``--list-devices`` prints."""
    lines = text.partition("Available devices:")[2].splitlines()
    return [found[1] for line in lines if (found := re.match(r"  (\w\S*): ", line))]


def check_loads(build: dict[str, Path]) -> None:
    """Raise `BackendUnavailable`, with the reason, where a build refuses the backend."""
    program = next(build[name] for name in PROGRAMS if name in build and "ops" not in name)
    done = run(program, ["--list-devices"], environment())
    if DEVICE in listed(done.stdout):
        return
    lines = (done.stderr + done.stdout).splitlines()
    said = [line for line in lines if line.startswith("kvpact: ")]
    said = said or [line for line in lines if "kvpact" in line] or ["it says nothing of it"]
    raise BackendUnavailable(f"{program} does not load {library()}: {'; '.join(said)}")


def readers(build: dict[str, Path]) -> dict[str, str]:
    """Return what each program needs to load the backend: the path alone, an option, too, or "?".

    They are started with a model that is not there: what they load comes before. Not all of them
    say in their log what they load, but the dynamic linker does (not that of musl, hence "?").
    """
    found = {}
    for name in (name for name in LOADERS if name in build):
        found[name] = "?"
        for every in (False, True):
            variables = environment(every_program=every) | LINKER
            done = run(build[name], ["-m", os.devnull], variables)
            if str(library()) in done.stdout + done.stderr:
                found[name] = "GGML_BACKEND_PATH" + (" and -ot none=CPU" if every else "")
                break
    return found


def operations(program: Path, cases: str, report: Report, limit: float = LIMIT) -> Ops:
    """Have ``test-backend-ops`` compare attention with that of ggml's backend for CPUs.

    `cases` is a regular expression of what it prints of a case. Raises `KVPactError` where it ends
    without having compared any.
    """
    words = [str(program), "test", "-o", "FLASH_ATTN_EXT", "-b", DEVICE, "-p", cases]
    count: Counter[str] = Counter()
    with subprocess.Popen(
        words, env=clean(environment() | ALL_CASES), stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        timer = Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            plain = COLOUR.sub("", line)
            if plain.startswith("  FLASH_ATTN_EXT(") and (result := RESULT.search(plain)):
                count[result[1]] += 1
                report(count.total(), None, f"{count.total()} cases")
        late = timer.finished.is_set()
        timer.cancel()
    if late:
        raise _late(program, limit)
    ops = Ops(count["OK"], count["FAIL"], count["not supported"])
    if (process.returncode and not ops.failed) or not ops.passed + ops.failed:
        raise KVPactError(f"{program} ended with {process.returncode} after {ops}")
    return ops


def timing(
    program: Path, words: Iterable[object], variables: dict[str, str], limit: float = LIMIT
) -> Timing:
    """Run one test of ``llama-bench`` once and return what a token took.

    Raises
    ------
    KVPactError
        It failed; the error has its last line, or the signal that ended it.
    """
    done = run(program, [*words, "-r", 1, "-o", "json"], variables | COUNT, limit)
    try:
        (row,) = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip() or "no output").splitlines()[-1]
        if done.returncode < 0:  # its last line says nothing of it then
            why = signal.strsignal(-done.returncode) or why
        raise KVPactError(f"{program} ended with {done.returncode}: {why}") from None
    attentions = sum(map(int, re.findall(r"^kvpact: computed (\d+)", done.stderr, re.M)))
    tokens = row["n_prompt"] + row["n_gen"]
    names = str(row["backends"]).lower().split(",")
    return Timing(row["avg_ns"] / tokens / 1e6, attentions, "kvpact" in names)


def pair(program: Path, words: list[object], rounds: int, limit: float = LIMIT) -> dict[str, Any]:
    """Run a test of ``llama-bench`` with the backend and without it in turns; medians.

    The backend takes f16, too: `words` have flash attention on. Raises `KVPactError` where it was
    not loaded in its turn, or was in the other one.
    """
    runs: dict[bool, list[Timing]] = {False: [], True: []}
    for turn in range(2 * rounds):
        ours = turn % 2 == 1
        found = timing(program, words, environment() | F16 if ours else {}, limit)
        if found.loaded != ours:
            raise KVPactError(f"{program} {'did not load' if ours else 'loaded'} the backend")
        runs[ours].append(found)
    return {
        "ms": median(x.ms for x in runs[False]),
        "kvpact_ms": median(x.ms for x in runs[True]),
        "attentions": runs[True][0].attentions,
        "used": runs[True][0].attentions > 0,
    }
