"""The native CPU kernels: a shared library with a C interface, loaded by ctypes."""

from kvpact.kernels.cpu.library import LEVELS, NativeLibrary, library

__all__ = ["LEVELS", "NativeLibrary", "library"]
