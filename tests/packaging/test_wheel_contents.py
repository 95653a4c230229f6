"""What is wrong with a wheel is found; the right ones are built and inspected by `make wheels`."""

import zipfile

import pytest
import wheel_contents
from wheel_contents import FOLDER, GGML, interface, library_problems, problems
from wheel_platforms import PLATFORMS

from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.library import _load

X86, ARM, MACOS, WINDOWS = PLATFORMS


def about(tag, purelib="false"):
    return f"Wheel-Version: 1.0\nRoot-Is-Purelib: {purelib}\nTag: {tag}\n"


def make_wheel(folder, platform, files, about):
    path = folder / f"kvpact-0-{platform.full_tag}.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("kvpact-0.dist-info/WHEEL", about)
        for name in files:
            made.writestr(name, b"no library")
    return path


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_a_wheel_without_its_library(tmp_path, platform):
    wheel = make_wheel(tmp_path, platform, ["kvpact/__init__.py"], about(platform.full_tag))
    (problem,) = problems(wheel, platform)
    suffix = ".dll" if platform.system == "win32" else ".so"
    expected = [GGML + suffix, f"{FOLDER}/{platform.library}"]
    assert problem == f"It holds the binaries [], not {expected}."


@pytest.mark.parametrize("other", ("kvpact/more.so", f"{FOLDER}/libkvpact_cpu.dll"))
def test_a_wheel_with_a_binary_too_many(tmp_path, other):
    files = [f"{FOLDER}/{X86.library}", other]
    (problem,) = problems(make_wheel(tmp_path, X86, files, about(X86.full_tag)), X86)
    assert other in problem


def test_a_wheel_that_is_tagged_for_another_python_or_platform(tmp_path):
    for said in (about("cp311-abi3-win_amd64"), about(X86.full_tag)):
        found = problems(make_wheel(tmp_path, WINDOWS, [], said), WINDOWS)
        assert found[0].endswith(f"not {WINDOWS.full_tag}.")
    found = problems(make_wheel(tmp_path, WINDOWS, [], about(WINDOWS.full_tag, "true")), WINDOWS)
    assert found[0] == "It says that it is pure Python."
    wheel = make_wheel(tmp_path, WINDOWS, [], about(MACOS.full_tag))
    assert problems(wheel, MACOS)[0] == "Its name has another tag."


def test_the_header_names_what_the_loader_wants():
    assert interface() == {
        *("kvp_abi", "kvp_levels", "kvp_scratch", "kvp_read", "kvp_magnitudes"),
        *("kvp_attend", "kvp_attend_rows", "kvp_encode", "kvp_decode", "kvp_prompt"),
        *("kvp_step", "kvp_scan", "kvp_gather", "kvp_heap_hold", "kvp_heap_trim", "kvp_openmp"),
    }


@pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")
def test_a_library_that_needs_the_compilers_own_libraries(monkeypatch):
    here = ARM if "neon" in library().levels else X86
    needs = library_problems(library().path, here)[0]
    assert needs.startswith("The library needs") and "libstdc++" in needs
    monkeypatch.setattr(wheel_contents, "interface", lambda: {"kvp_abi"})
    assert any("kvp_attend" in problem for problem in library_problems(library().path, here))


@pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")
@pytest.mark.parametrize("platform", (MACOS, WINDOWS), ids=lambda platform: platform.name)
def test_a_library_of_another_system(platform):
    found = library_problems(library().path, platform)
    assert found == [f"The library is no library of {platform.name}."]
