"""A separate distribution goes through the public kit: good parts pass, broken parts fail."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kvpact

SOURCE = Path(__file__).parent / "ternary"
# Class of conformance.py: checks that have to fail.
BROKEN = {
    "TestDrifting": {"test_pieces_are_the_whole"},
    "TestDriftingInACache": {"test_pieces_are_the_whole", "test_rows_are_independent"},
    "TestHiding": {"test_nothing_stays_in_the_codec"},
    "TestHidingInACache": {"test_memory_is_what_is_held"},
    "TestNotANumber": {"test_hard_input_is_finite_or_refused"},
    "TestUndeclared": {"test_arrays_are_as_declared"},
    "TestThawed": {"test_methods_are_frozen_and_hashable"}, "TestBlank": {"test_distortion"},
    "TestDirty": {"test_unused_slots_are_zero_and_never_read", "test_a_cut_group_continues"},
    "TestSharingFork": {"test_forks_are_independent"},
    "TestUndercounting": {"test_memory_is_what_is_held"}, "TestHalfStoring": {"test_wrong_tensors"},
    "TestRelearning": {"test_nothing_stays_in_the_codec", "test_pieces_are_the_whole"},
    "TestRelearningOnPages": {"test_pieces_are_the_whole", "test_rows_are_independent"},
    "TestInPlace": {"test_fit_returns_another_codec"},
    "TestSecret": {"test_state_is_all_that_was_learnt"},
    "TestSecretInACache": {"test_memory_is_what_is_held"},
    "TestTrusting": {"test_wrong_states_are_refused"},
}  # fmt: skip
GOOD = {
    "TestTernary", "TestTernaryInACache", "TestTernaryOnPages", "TestScaled", "TestScaledInACache",
    "TestScaledOnPages", "TestListCache",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the distribution in it, as an installer leaves it (no network, no build)."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    for module in SOURCE.glob("*.py"):
        shutil.copy(module, folder)
    info = folder / f"kvpact_ternary-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def run(site, *arguments):
    path = [str(site), str(Path(kvpact.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=site, env=environment, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(site):
    """Failed checks by class; of a broken part only those that have to fail are run."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--junitxml=out.xml", "--tb=line"]
    wanted = [
        *(f"conformance.py::{name}" for name in sorted(GOOD)),
        *(f"conformance.py::{name}::{check}" for name in BROKEN for check in sorted(BROKEN[name])),
    ]
    process = run(site, "-m", "pytest", "-c", os.devnull, *options, *wanted)
    assert process.returncode == 1, process.stdout[-2000:] + process.stderr[-2000:]
    failed = {}
    for case in ElementTree.parse(site / "out.xml").iter("testcase"):
        checks = failed.setdefault(case.get("classname").rpartition(".")[2], set())
        if case.find("failure") is not None or case.find("error") is not None:
            checks.add(case.get("name").partition("[")[0])
    return failed


@pytest.mark.parametrize("name", sorted(GOOD))
def test_good_ones_pass(outcomes, name):
    assert outcomes[name] == set()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_fail(outcomes, name):
    assert outcomes[name] == BROKEN[name]


def test_every_class_ran(outcomes):
    assert set(outcomes) == GOOD | set(BROKEN)


def test_methods_of_others_are_found_by_name_imported_when_used_and_take_no_other_name(site):
    code = """
import sys, json, kvpact, dataclasses
from kvpact.registry import known_names
names = known_names()
before = "kvpact_ternary" in sys.modules
spec = kvpact.parse_spec("ternary:window=8/kivi:bits=4")
after = "kvpact_ternary" in sys.modules
print(json.dumps([names, before, after, str(spec), "kvpact_broken" in sys.modules]))

from kvpact.errors import RegistrationError
from kvpact.methods.integer import Integer
from kvpact_broken import Blank

def refused(call, *arguments):
    try:
        call(*arguments)
    except RegistrationError as error:
        return str(error)
    raise SystemExit(f"{arguments} was not refused")

same = dataclasses.dataclass(frozen=True, kw_only=True)(type("Same", (Blank,), {"name": "ternary"}))
print(refused(kvpact.register_method, same))
print(refused(kvpact.register_method, Integer))
print(refused(kvpact.parse_spec, "int:bits=4"))
"""
    process = run(site, "-c", code)
    assert process.returncode == 0, process.stdout + process.stderr
    told, first, second, third = process.stdout.splitlines()
    names, before, after, spec, others = json.loads(told)
    assert {"ternary", "ternary_nan", "turboquant"} <= set(names)
    assert (before, after, others) == (False, True, False)
    assert spec == "ternary:window=8/kivi:bits=4"
    assert "'ternary'" in first
    assert "'int'" in second
    assert "kvpact.methods.integer:Integer and kvpact_ternary:Ternary" in third
