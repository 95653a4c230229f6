"""The NEON level gives the torch bodies' results: compiled for AArch64, run by an emulator.

`make neon` runs this. It needs CMake, a cross compiler and QEMU (Debian: `g++-aarch64-linux-gnu`,
`qemu-user`), or an AArch64 machine, where the other tests here cover it.
"""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from record import record_all
from recorder import CHECKS, Recorder

from kvpact.kernels.cpu.library import _load

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
MISSING = [name for name in ("cmake", COMPILER) if not shutil.which(name)]
MISSING += [] if EMULATOR else ["qemu-aarch64"]

pytestmark = [
    pytest.mark.neon,
    pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}"),
    pytest.mark.skipif(bool(MISSING), reason=f"not there: {', '.join(MISSING)}"),
]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def driver():
    """Build the driver; later runs compile what has changed."""
    build = ROOT / "build" / "neon"
    toolchain = Path(__file__).with_name("aarch64.cmake")
    options = (f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", "-DKVPACT_DRIVER=ON")
    made = run("cmake", "-S", ROOT, "-B", build, *options)
    assert made.returncode == 0, made.stderr
    made = run("cmake", "--build", build, "--target", "driver")
    assert made.returncode == 0, made.stderr
    return build / "driver"


@pytest.fixture(scope="module")
def recorder():
    """Calls of every format."""
    with Recorder().recording() as found:
        record_all(found)
    return found


def test_neon_and_the_base_level_agree_with_torch(driver, recorder, tmp_path):
    recorder.write(tmp_path / "cases")
    done = run(EMULATOR, driver, tmp_path / "cases")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["level"] for line in told] == ["none", "neon"], done.stderr
    assert all(line["failed"] == [] and line["cases"] > 400 for line in told), told
    assert done.returncode == 0


@pytest.mark.parametrize("operation", CHECKS)
def test_the_driver_finds_one_bit_that_differs(driver, recorder, tmp_path, operation):
    # Not a score that is zero: what a bit of the mantissa adds to it is within the bound.
    recorded = (one for one in recorder.cases if one.operation == operation)
    case = copy.deepcopy(next(one for one in recorded if any(one.written()[0].expected[:4])))
    block = case.written()[0]
    block.expected = bytes([*block.expected[:2], block.expected[2] ^ 0x40, *block.expected[3:]])
    Recorder([case]).write(tmp_path / "changed")
    done = run(EMULATOR, driver, tmp_path / "changed", "--level", "neon")
    (failed,) = json.loads(done.stdout)["failed"]
    assert failed.startswith(f"{operation} {case.label} (") and done.returncode == 1


def test_a_file_that_is_cut_is_refused(driver, recorder, tmp_path):
    Recorder(recorder.cases[:1]).write(tmp_path / "cut")
    cut = (tmp_path / "cut").read_bytes()[:-1]
    (tmp_path / "cut").write_bytes(cut)
    done = run(EMULATOR, driver, tmp_path / "cut")
    assert done.returncode == 2 and "cut" in done.stderr
