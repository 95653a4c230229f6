"""Checks a wheel without running it: tags, and what the native library needs and offers."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import lief
from wheel_platforms import Platform

FOLDER = "kvpact/kernels/cpu"
GGML = "kvpact/integrations/llama_cpp/libggml-kvpact"  # .dll on Windows, .so elsewhere
GGML_EXPORTS = {"ggml_backend_init", "ggml_backend_score"} | {
    f"kvpact_ggml_{name}" for name in ("computed", "found", "refused")
}
BINARIES = (".so", ".dylib", ".dll", ".pyd", ".a", ".lib", ".o")
HEADER = Path(__file__).parents[1] / "src" / FOLDER / "abi.h"

MACOS_EXPORTS = re.compile(r"_Z[nd][awl](m|Pv)\w*|__dso_handle|_mh_dylib_header")
"""What Zig's linker exports of every library of macOS, whatever it is told: marks of the file, and
weak ``operator new`` and ``delete``, in whose place macOS takes those of its own C++ library."""


def problems(wheel: Path, platform: Platform) -> list[str]:
    """Return what is wrong with a platform's wheel, in whole sentences."""
    found = [] if f"-{platform.full_tag}.whl" in wheel.name else ["Its name has another tag."]
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        found += _tag_problems(packed.read(about).decode(), platform)
        suffix = ".dll" if platform.system == "win32" else ".so"
        expected = [GGML + suffix, f"{FOLDER}/{platform.library}"]
        binaries = [name for name in names if name.endswith(BINARIES)]
        if sorted(binaries) != expected:
            return [*found, f"It holds the binaries {binaries}, not {expected}."]
        with tempfile.TemporaryDirectory() as folder:
            for name in expected:
                found += library_problems(Path(packed.extract(name, folder)), platform)
    if platform.system == "linux":
        found += _glibc_problems(wheel, platform)
    return found


def interface() -> set[str]:
    """Return the names of the functions that the library has to export, by its header."""
    return set(re.findall(r"KVP_EXPORT\s+\w+\s+(kvp_\w+)\(", HEADER.read_text("utf-8")))


def library_problems(path: Path, platform: Platform) -> list[str]:
    """Return what is wrong with a native library."""
    binary = lief.parse(str(path))
    kinds = {"linux": lief.ELF.Binary, "darwin": lief.MachO.Binary, "win32": lief.PE.Binary}
    if not isinstance(binary, kinds[platform.system]):
        return [f"The library is no library of {platform.name}."]
    found = []
    if _machine(binary) != platform.machine:
        found.append(f"The library is of {_machine(binary)}, not {platform.machine}.")
    needed = {str(getattr(library, "name", library)) for library in binary.libraries}
    if isinstance(binary, lief.MachO.Binary):
        needed.discard(f"@rpath/{path.name}")  # its own name
        found += _macos_problems(binary, platform)
    if alien := [n for n in needed if not any(fnmatch.fnmatch(n, one) for one in platform.needs)]:
        found.append(f"The library needs {', '.join(sorted(alien))}.")
    offered = {function.name.removeprefix("_") for function in binary.exported_functions}
    if platform.system == "darwin":
        offered = {name for name in offered if not MACOS_EXPORTS.fullmatch(name)}
    names = GGML_EXPORTS if path.stem == Path(GGML).name else interface()
    if offered != names:
        found.append(f"It exports other functions than it should: {sorted(offered ^ names)}.")
    wanted = {function.name for function in binary.imported_functions}
    if python := sorted(name for name in wanted if re.match(r"_*Py[A-Z_]", name)):
        found.append(f"It calls Python: {', '.join(python)}.")
    return found


def _machine(binary: lief.Binary) -> str:
    if isinstance(binary, lief.ELF.Binary):
        kind = binary.header.machine_type
        return {lief.ELF.ARCH.X86_64: "x86_64", lief.ELF.ARCH.AARCH64: "aarch64"}.get(
            kind, str(kind)
        )
    if isinstance(binary, lief.MachO.Binary):
        kind = binary.header.cpu_type
        return {lief.MachO.Header.CPU_TYPE.ARM64: "arm64"}.get(kind, str(kind))
    kind = binary.header.machine
    return {lief.PE.Header.MACHINE_TYPES.AMD64: "AMD64"}.get(kind, str(kind))


def _macos_problems(binary: lief.MachO.Binary, platform: Platform) -> list[str]:
    found = []
    # Processors of Apple refuse code without a signature, be it nobody's.
    if not binary.has_code_signature:
        found.append("The library has no code signature.")
    oldest = tuple(int(part) for part in platform.tag.split("_")[1:3])
    if not binary.has_build_version or tuple(binary.build_version.minos[:2]) > oldest:
        found.append(f"The library does not say that it runs on macOS {oldest}.")
    return found


def _tag_problems(about: str, platform: Platform) -> list[str]:
    said = Parser().parsestr(about)
    found = []
    if said.get_all("Tag") != [platform.full_tag]:
        found.append(f"Its tags are {said.get_all('Tag')}, not {platform.full_tag}.")
    if said["Root-Is-Purelib"] != "false":
        found.append("It says that it is pure Python.")
    return found


def _glibc_problems(wheel: Path, platform: Platform) -> list[str]:
    """Ask auditwheel which tag the symbols allow: that of the wheel, or an older one."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    told = " ".join(done.stdout.split())
    allowed = re.search(r'following platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', told)
    if done.returncode or not allowed:
        return [f"auditwheel finds no manylinux tag for it: {told or done.stderr}"]
    major, minor = (int(part) for part in platform.tag.split("_")[1:3])
    if (int(allowed[1]), int(allowed[2])) > (major, minor) or allowed[3] != platform.machine:
        return [f"auditwheel allows no older tag than {allowed[0]}."]
    return []
