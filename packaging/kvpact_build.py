"""The build backend: scikit-build-core, and where its CMake build can't be done, none.

Without CMake, a generator or a working compiler the package is installed without native kernels.
It then computes everything in torch, and ``kvpact doctor`` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from scikit_build_core import build as backend

get_requires_for_build_sdist = backend.get_requires_for_build_sdist
get_requires_for_build_wheel = backend.get_requires_for_build_wheel
get_requires_for_build_editable = backend.get_requires_for_build_editable
build_sdist = backend.build_sdist
# Without these, frontends would build a whole wheel to read its metadata.
prepare_metadata_for_build_wheel = backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = backend.prepare_metadata_for_build_editable


def _build(hook: Callable[..., str], directory: str, settings: Any, metadata: str | None) -> str:
    try:
        return hook(directory, settings, metadata)
    # scikit-build-core leaves with SystemExit where CMake or the compiler fail.
    except (Exception, SystemExit) as error:
        # Who names a platform's tags builds wheels to publish: none without a library.
        if "wheel.tags" in (settings or {}):
            raise
        lost = "building kvpact without native kernels; attention will be many times slower"
        print(f"WARNING: {error or type(error).__name__}: {lost}", file=sys.stderr)
        return hook(directory, {**(settings or {}), "wheel.cmake": "false"}, metadata)


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build a wheel."""
    return _build(backend.build_wheel, directory, settings, metadata)


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build what an editable install needs."""
    return _build(backend.build_editable, directory, settings, metadata)
