"""The list of seeded faults (`tools/faults`) fits the sources and the tests as they are."""

from importlib import util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_can_be_made_and_is_looked_for():
    spec = util.spec_from_file_location("faults_run", ROOT / "tools" / "faults" / "run.py")
    run = util.module_from_spec(spec)
    spec.loader.exec_module(run)
    faults = run.read_faults(ROOT / "tools" / "faults" / "faults.toml")
    assert len(faults) >= 60
    assert run.errors(faults) == []
