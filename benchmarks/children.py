"""Fresh processes, and what a process holds in memory by the kernel's own count (Linux)."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Ended(Exception):
    """A process ended with an error; the text is its last words."""


def fresh(
    *words: object, environment: Mapping[str, str | None] | None = None, places: Sequence[Path] = ()
) -> str:
    """Run Python with these words in a new process; return what it prints.

    Variables that are None are unset. What is installed in `places` goes first, programs too.
    """
    given = os.environ | dict(environment or {})
    for name, more in {"PYTHONPATH": places, "PATH": [each / "bin" for each in places]}.items():
        if parts := [*map(str, more), *filter(None, [given.get(name)])]:
            given[name] = os.pathsep.join(parts)
    env = {name: value for name, value in given.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Ended((done.stderr.strip() or "it was killed").splitlines()[-1])
    return done.stdout


def asked(script: str, what: Any, **options: Any) -> Any:
    """Let a script of this folder, in a new process, `answer` what is asked."""
    return json.loads(fresh(script, "--asked", json.dumps(what), **options).splitlines()[-1])


def answer(work: Callable[..., Any]) -> bool:
    """Where this process was `asked`, print what `work` returns for that; say whether it was."""
    if sys.argv[1:2] != ["--asked"]:
        return False
    what = json.loads(sys.argv[2])
    print(json.dumps(work(**what) if isinstance(what, dict) else work(*what)))
    return True


def status(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def resident() -> int:
    """Return the bytes resident, free ones that no one gave back to the system among them."""
    gc.collect()
    return status("VmRSS")


def peak_start() -> int:
    """Set the peak back to what is resident now, and return that."""
    found = resident()
    CLEAR.write_text("5")  # resets VmHWM, see proc(5)
    return found


def peak_over(start: int) -> int:
    """Return how many bytes more than at the start were resident at any time since."""
    return status("VmHWM") - start
