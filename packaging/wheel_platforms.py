"""The platforms that wheels are built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """A platform with a wheel of its own.

    Parameters
    ----------
    name : str
        As reports name it.
    system, machine : str
        As Python names them there (`sys.platform`, `platform.machine()`).
    tag : str
        The wheel's platform tag. The library needs no Python, so the whole tag is
        ``py3-none-`` and this.
    target : str
        What Zig compiles for, with the oldest C library of that tag.
    library : str
        File name of the native library.
    needs : tuple of str
        Libraries of the platform that the native library may need. Nothing else.
    """

    name: str
    system: str
    machine: str
    tag: str
    target: str
    library: str
    needs: tuple[str, ...]

    @property
    def full_tag(self) -> str:
        """The whole tag of the wheel."""
        return f"py3-none-{self.tag}"


GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2")

PLATFORMS = (
    Platform(
        name="Linux x86-64",
        system="linux",
        machine="x86_64",
        tag="manylinux_2_17_x86_64",
        target="x86_64-linux-gnu.2.17",
        library="libkvpact_cpu.so",
        needs=(*GLIBC, "ld-linux-x86-64.so.2"),
    ),
    Platform(
        name="Linux aarch64",
        system="linux",
        machine="aarch64",
        tag="manylinux_2_17_aarch64",
        target="aarch64-linux-gnu.2.17",
        library="libkvpact_cpu.so",
        needs=(*GLIBC, "ld-linux-aarch64.so.1"),
    ),
    Platform(
        name="macOS arm64",
        system="darwin",
        machine="arm64",
        tag="macosx_11_0_arm64",
        target="aarch64-macos.11.0",
        library="libkvpact_cpu.dylib",
        needs=("/usr/lib/libSystem.B.dylib",),
    ),
    Platform(
        name="Windows x86-64",
        system="win32",
        machine="AMD64",
        tag="win_amd64",
        target="x86_64-windows-gnu",
        library="libkvpact_cpu.dll",
        needs=("KERNEL32.dll", "ntdll.dll", "api-ms-win-crt-*.dll"),
    ),
)
