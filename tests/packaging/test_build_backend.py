"""Installing without a compiler goes on without kernels; building a wheel to publish does not."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from by_path import module_at

BACKEND = Path(__file__).parents[2] / "packaging" / "kvpact_build.py"


@pytest.fixture
def calls(monkeypatch):
    """Settings that scikit-build-core was called with; it fails where it would run CMake."""
    made = []

    def build(directory, settings, metadata):
        made.append(settings)
        if not settings or settings.get("wheel.cmake") != "false":
            raise SystemExit("CMake failed")
        return "kvpact-0-py3-none-any.whl"

    hooks = ("requires_for_build_sdist", "requires_for_build_wheel", "requires_for_build_editable")
    names = [f"get_{hook}" for hook in hooks] + ["build_sdist"]
    names += [f"prepare_metadata_for_build_{kind}" for kind in ("wheel", "editable")]
    fake = SimpleNamespace(build_wheel=build, build_editable=build, **dict.fromkeys(names))
    package = ModuleType("scikit_build_core")
    package.build = fake
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    return made


@pytest.fixture
def backend(calls):
    return module_at(BACKEND)


@pytest.mark.parametrize("hook", ("build_wheel", "build_editable"))
def test_without_a_compiler_a_warning_and_a_wheel(backend, calls, capsys, hook):
    assert getattr(backend, hook)("out", {"build-dir": "b"}) == "kvpact-0-py3-none-any.whl"
    assert calls == [{"build-dir": "b"}, {"build-dir": "b", "wheel.cmake": "false"}]
    told = "WARNING: CMake failed: building kvpact without native kernels"
    assert told in capsys.readouterr().err


def test_a_wheel_to_publish_has_a_library_or_is_not_made(backend, calls):
    with pytest.raises(SystemExit, match="CMake failed"):
        backend.build_wheel("out", {"wheel.tags": "py3-none-win_amd64"})
    assert len(calls) == 1
