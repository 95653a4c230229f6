"""What is known to do badly is told, and of nothing else."""

import json
import re
from pathlib import Path

import pytest

from kvpact import parse_spec
from kvpact.methods.cautions import CAUTIONS, KEY_BIAS, KEY_NORM, cautions
from kvpact.spec import DEFAULT_SPEC

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "models"


@pytest.mark.parametrize(("spec", "model", "words"), [
    ("turboquant:bits=3", [KEY_NORM], ["a rotation spreads"]),
    ("int:bits=3,rotate=true", [KEY_NORM], ["a rotation spreads"]),
    ("turboquant:bits=3", [], []),
    ("turboquant:bits=3,center=64", [KEY_NORM], []),
    ("turboquant:bits=3,first=true", [KEY_NORM], []),
    ("qjl", [KEY_NORM], ["kept for comparison"]),
    ("turboquant:bits=8", [KEY_NORM, KEY_BIAS], []),
    ("int:bits=4", [], ["plain integers"]),
    ("int:bits=4", [KEY_BIAS], ["a bias takes", "plain integers"]),
    ("int:bits=4,rotate=true", [], []),
    ("int:bits=8", [KEY_NORM, KEY_BIAS], []),
    ("q4_0", [], ["plain integers", "without exact first tokens"]),
    ("kivi:bits=2", [], ["kivi:bits=2 has"]),
    ("kivi:bits=4", [KEY_NORM], []),
    ("turboquant:bits=4,sinks=0", [], ["without exact first tokens"]),
    ("int:bits=8,sinks=0", [], []),
    ("int:bits=8/int:bits=4", [KEY_NORM, KEY_BIAS], []),
    ("none", [KEY_NORM, KEY_BIAS], []),
    (DEFAULT_SPEC, [KEY_NORM, KEY_BIAS], []),
    ("trellis:bits=2", [KEY_NORM, KEY_BIAS], []),
])  # fmt: skip
def test_what_is_told(spec, model, words):
    found = cautions(parse_spec(spec), model)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_of_an_unknown_model_it_is_told_whom_it_is_about():
    found = cautions(parse_spec("turboquant:bits=3"))
    assert [line.startswith("on models whose keys") for line in found] == [True, True]
    assert "QK-norm" in found[0] and "Qwen2" in found[1]


def test_figures_are_those_of_the_results():
    """Each is the mean KL of a row, in two digits."""
    rows = [row for path in RESULTS.glob("*/eval.json") for row in json.loads(path.read_text())]
    measured = {float(f"{row['kl_mean']:.2g}") for row in rows}
    told = [caution.text for caution in CAUTIONS if caution.model != KEY_BIAS]
    figures = [float(x) for text in told for x in re.findall(r"\d\.\d+(?!\d| bits)", text)]
    assert len(figures) > 25
    assert set(figures) <= measured
