"""A library that computes something else, or finds fewer levels, is no wheel to publish."""

import json
import sys

import pytest
import wheel_replay
from wheel_platforms import PLATFORMS
from wheel_replay import expected_levels, replay, runner

X86, ARM, MACOS, WINDOWS = PLATFORMS
LEVELS = ["none", "neon"]


def line(level, failed=()):
    return json.dumps({"level": level, "cases": 3, "worst": 1e-7, "failed": list(failed)})


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Replay with a driver that prints lines and leaves with a status."""

    def with_driver(lines, status=0, errors=""):
        script = tmp_path / "driver.py"
        code = f"import sys\nprint({chr(10).join(lines)!r})\nsys.exit({errors!r} or {status})"
        script.write_text(code)
        monkeypatch.setattr(wheel_replay, "driver", lambda platform, wheel: script)
        monkeypatch.setattr(wheel_replay, "runner", lambda platform: [sys.executable])
        return replay(ARM, tmp_path / "wheel", tmp_path / "cases")

    return with_driver


def test_all_calls_right(run, capsys):
    assert run([line("none"), line("neon")]) == []
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and "neon: 3 calls, 0 wrong, largest error 1e-07" in told[1]


def test_a_call_that_is_wrong(run):
    (wrong,) = run([line("none"), line("neon", ["decode int"])], status=1)
    assert wrong.endswith(", neon: decode int")


def test_a_level_that_the_library_does_not_find(run):
    """Zig's runtime library knows no processor: wheels would have computed at the base level."""
    (wrong,) = run([line("none")])
    assert "ran at ['none'], expected ['none', 'neon']" in wrong


def test_a_driver_that_ends_early(run):
    (wrong,) = run([line("none"), line("neon")], errors="no memory")
    assert wrong.endswith("no memory\n")


def test_what_nothing_runs_is_said_to_be_untested(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(wheel_replay.shutil, "which", lambda name, path=None: None)
    assert runner(MACOS) is None and runner(WINDOWS) is None
    assert replay(MACOS, tmp_path, tmp_path) == []
    assert "macOS arm64: compiled and inspected, UNTESTED" in capsys.readouterr().out


def test_linux_on_arm_is_emulated_or_an_error(monkeypatch):
    monkeypatch.setattr(wheel_replay.machine, "machine", lambda: "x86_64")
    monkeypatch.setattr(wheel_replay.shutil, "which", lambda name, path=None: None)
    assert runner(X86) == []
    with pytest.raises(SystemExit, match="apt-get install qemu-user libc6-arm64-cross"):
        runner(ARM)


@pytest.mark.parametrize(("flags", "levels"), [
    ("sse2", ["none"]), ("sse2 avx2 fma f16c", ["none", "avx2"]),
    ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni", ["none"]),
    ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vbmi", ["none", "avx2"]),
])  # fmt: skip
def test_levels_are_those_of_the_processor(monkeypatch, tmp_path, flags, levels):
    monkeypatch.setattr(wheel_replay, "PROCESSOR", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert expected_levels(X86) == expected_levels(WINDOWS) == levels
    assert expected_levels(ARM) == LEVELS
