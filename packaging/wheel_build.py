"""Builds the sdist and a wheel for each platform, compiled by Zig, and checks what is in them.

    python packaging/wheel_build.py [--out dist] [--repository https://…]

The wheels are built from the sdist, so it is complete where they are. With the repository's address
the page that an index shows has absolute links (see `wheel_page`). Needs the packages that
`make wheels` installs; no compiler of the machine is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from wheel_contents import problems
from wheel_page import prepare
from wheel_platforms import PLATFORMS, Platform

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"


def zig() -> Path:
    """Return the compiler, which is a program inside of the package `ziglang`."""
    import ziglang

    return Path(ziglang.__file__).with_name("zig")


def build(*words: object, source: Path, out: Path) -> Path:
    """Run ``python -m build`` and return the one file that it made.

    Raises
    ------
    SystemExit
        It failed; its output is printed.
    """
    before = set(out.glob("kvpact-*"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *words, source]
    # CMake finds the Ninja that stands beside this Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made = set(out.glob("kvpact-*")) - before
    if done.returncode or len(made) != 1:
        sys.exit(f"{done.stdout}\nbuilding {' '.join(map(str, words))} failed")
    return made.pop()


def build_sdist(source: Path, out: Path) -> Path:
    """Build the sdist of a source tree and return its path."""
    return build("--sdist", source=source, out=out)


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist and return its root."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    return next(folder.iterdir())


def build_wheel(platform: Platform, source: Path, out: Path) -> Path:
    """Build a platform's wheel from unpacked sources and return its path."""
    settings = {
        "wheel.tags": platform.full_tag,
        "build-dir": WORK / platform.tag,
        "cmake.define.CMAKE_TOOLCHAIN_FILE": ROOT / "packaging" / "zig.cmake",
        "cmake.define.KVPACT_ZIG": zig(),
        "cmake.define.KVPACT_TARGET": platform.target,
    }
    words = [f"--config-setting={name}={value}" for name, value in settings.items()]
    return build("--wheel", *words, source=source, out=out)


def main() -> None:
    """Build everything and leave with 1 where something is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--repository", help="address of the repository, to publish")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # Files of earlier builds would be published with those of this one.
    for old in options.out.glob("kvpact-*"):
        old.unlink()
    shutil.rmtree(WORK, ignore_errors=True)

    root = ROOT
    if options.repository:
        (WORK / "plain").mkdir(parents=True)
        root = unpacked(build_sdist(ROOT, WORK / "plain"), WORK / "page")
        prepare(root, options.repository)
    sdist = build_sdist(root, options.out)
    print(f"{sdist.name}  {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    source = unpacked(sdist, WORK / "source")
    wrong = []
    for platform in PLATFORMS:
        began = time.perf_counter()
        wheel = build_wheel(platform, source, options.out)
        seconds = time.perf_counter() - began
        size = wheel.stat().st_size / 1e6
        print(f"{wheel.name}  {size:.2f} MB, built in {seconds:.0f} s", flush=True)
        wrong += [f"{wheel.name}: {problem}" for problem in problems(wheel, platform)]
    sys.exit("\n".join(wrong) if wrong else None)


if __name__ == "__main__":
    main()
