"""The list of seeded faults (`tools/faults`) fits the sources and the tests as they are."""

from pathlib import Path

from by_path import module_at

ROOT = Path(__file__).parents[2]


def test_every_fault_can_be_made_and_is_looked_for():
    run = module_at(ROOT / "tools" / "faults" / "run.py")
    faults = run.read_faults(ROOT / "tools" / "faults" / "faults.toml")
    assert len(faults) >= 60
    assert run.errors(faults) == []
