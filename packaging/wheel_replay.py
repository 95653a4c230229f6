"""Runs recorded calls of the native kernels with the libraries that are in the wheels.

    python packaging/wheel_replay.py CASES [--dist dist]

CASES is a file of `tests/kernels/record.py`: calls, and what the torch bodies compute for them.
Each library runs them at every instruction set of its processor: this machine's, or an emulated
one's. That of Windows is run where Wine is there (Debian: wine64), and that of macOS nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as machine
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from wheel_build import ROOT, WORK, zig
from wheel_contents import FOLDER
from wheel_platforms import PLATFORMS, Platform

FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx512vbmi": {"avx512vbmi"},
}
"""What Linux says of a processor that has a level, beside the flags of the level before it."""


WINE = "/usr/lib/wine"
PROCESSOR = Path("/proc/cpuinfo")


def expected_levels(platform: Platform) -> list[str]:
    """Return the levels that a platform's library has to find: the processor's own, or NEON."""
    if platform.machine in ("aarch64", "arm64"):
        return ["none", "neon"]
    here = set(PROCESSOR.read_text("utf-8").split())
    levels = ["none"]
    for level, flags in FLAGS.items():
        if not flags <= here:
            break
        levels.append(level)
    return levels


def runner(platform: Platform) -> list[str] | None:
    """Return what runs a platform's programs here; None where nothing does.

    Raises
    ------
    SystemExit
        An emulator of another processor is not there; the message says what to install.
    """
    if platform.system != "linux":
        wine = shutil.which("wine64") or shutil.which("wine") or shutil.which("wine64", path=WINE)
        return [wine] if wine and platform.system == "win32" else None
    if platform.machine == machine.machine():
        return []
    emulator = shutil.which(f"qemu-{platform.machine}")
    libraries = Path(f"/usr/{platform.machine}-linux-gnu")
    if not emulator or not libraries.is_dir():
        sys.exit(
            f"{platform.name}: qemu-{platform.machine} or {libraries} is not there, the library"
            " was not run (Debian: apt-get install qemu-user libc6-arm64-cross)"
        )
    return [emulator, "-L", str(libraries)]


def driver(platform: Platform, wheel: Path) -> Path:
    """Compile the driver of recorded calls against the library of a wheel; return its path."""
    folder = WORK / "replay" / platform.tag
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as packed:
        (folder / platform.library).write_bytes(packed.read(f"{FOLDER}/{platform.library}"))
    made = folder / ("driver.exe" if platform.system == "win32" else "driver")
    command = [zig(), "c++", "-target", platform.target, "-std=gnu++17", "-O1", "-g0"]
    command += [
        "-I",
        ROOT / "src" / FOLDER,
        "-I",
        ROOT / "src" / FOLDER / "native",
        ROOT / "tests" / "kernels" / "driver.cpp",
    ]
    command += [folder / platform.library, "-o", made]
    if platform.system == "linux":
        command.append(f"-Wl,-rpath,{folder}")
    subprocess.run([str(word) for word in command], check=True)
    return made


def replay(platform: Platform, wheel: Path, cases: Path) -> list[str]:
    """Run all cases with a wheel's library, print a line for each level, return what is wrong."""
    prefix = runner(platform)
    if prefix is None:
        print(f"{platform.name}: compiled and inspected, UNTESTED: nothing here runs it")
        return []
    command = [*prefix, str(driver(platform, wheel)), str(cases.resolve())]
    env = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(WORK / "wine")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    where = f"{platform.name} under {Path(prefix[0]).name}" if prefix else platform.name
    wrong = []
    for line in told:
        print(
            f"{where}, {line['level']}: {line['cases']} calls, {len(line['failed'])} wrong,"
            f" largest error {line['worst']}",
            flush=True,
        )
        wrong += [f"{where}, {line['level']}: {case}" for case in line["failed"]]
    levels, expected = [line["level"] for line in told], expected_levels(platform)
    if levels != expected or (done.returncode and not wrong):
        wrong.append(f"{where}: ran at {levels}, expected {expected}: {done.stderr}")
    return wrong


def main() -> None:
    """Replay with every library that can be run here; leave with 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    wrong = []
    for platform in PLATFORMS:
        (wheel,) = options.dist.glob(f"kvpact-*-{platform.full_tag}.whl")
        wrong += replay(platform, wheel, options.cases)
    sys.exit("\n".join(wrong) if wrong else None)


if __name__ == "__main__":
    main()
