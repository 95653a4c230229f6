"""Save, kill the process, go on in a new one: the same logits, for every method and layout."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from tiny_configs import KINDS

import kvpact
from kvpact.registry import Alias

SCRIPT = Path(__file__).with_name("snapshot_process.py")


def run(what: str, folder: Path) -> dict:
    command = [sys.executable, str(SCRIPT), what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    return json.loads((folder / f"{what}.json").read_text())


def test_the_same_logits_bit_for_bit_after_a_kill(tmp_path: Path):
    never_stopped, restored = run("save", tmp_path), run("go", tmp_path)
    methods = [n for n, m in kvpact.list_methods().items() if not isinstance(m, Alias)]
    assert len(methods) >= 11
    # Not all versions of transformers have all kinds.
    assert len(KINDS) >= len(never_stopped) - 2 * len(methods) - 1 >= 1
    assert [name for name, x in never_stopped.items() if restored[name] != x] == []
    assert len(set(never_stopped.values())) > len(methods)
