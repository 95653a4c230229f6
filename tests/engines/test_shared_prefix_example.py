"""The example of two engines and a Mooncake master runs, and the second engine loads the prompt."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_prefix" / "shared_prefix.py"


def test_the_second_engine_loads_all_but_the_end_of_the_prompt(start_master, tmp_path):
    command = [sys.executable, str(EXAMPLE), "--tokens", "1000", "--logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    logs = [path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log"))]
    assert done.returncode == 0, (done.stderr, logs)
    found = re.findall(r"the (\w+) engine: ([\d,]+) tokens, ([\d,]+) of them loaded", done.stdout)
    (first, tokens, loaded), (second, same, whole) = found
    assert (first, loaded, second, same) == ("first", "0", "second", tokens)
    tokens = int(tokens.replace(",", ""))
    assert abs(tokens - 1000) < 20
    assert int(whole.replace(",", "")) == (tokens - 1) // 64 * 64
    assert re.search(r"[\d.]+ times as soon", done.stdout)
