"""Quality on the real model: 3,000 tokens of a book in chunks of 256 (`make test-slow`)."""

import pytest
import torch

from kvpact import parse_spec
from kvpact.data import book_path
from kvpact.evaluate import Candidate, evaluate_text
from kvpact.integrations.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SPECS = (
    "int:bits=8", "turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=3,center=64",
    "kvarn:bits=3", "trellis:bits=4", "trellis:bits=3", "trellis:bits=2",
)  # fmt: skip
WITHOUT_SINKS = "trellis:bits=2,sinks=0"


@pytest.fixture(scope="module")
def rows():
    """Every spec as shipped, as the pure codec, and packed only: rows by (spec, mode)."""
    torch.manual_seed(0)
    model, tokenizer = load_model()
    modes = {
        "shipped": lambda spec: Candidate(spec),
        "pure": lambda x: Candidate(parse_spec(x).with_options(sinks=0, window=0), exact_new=True),
        "packed only": lambda spec: Candidate(spec, packed_only=True),
    }
    keys = [(spec, mode) for spec in SPECS for mode in modes]
    keys.append((WITHOUT_SINKS, "shipped"))
    candidates = [modes[mode](spec) for spec, mode in keys]
    text = book_path().read_text("utf-8")
    result = evaluate_text(model, candidates, text, tokenizer=tokenizer, tokens=3000, chunk=256)
    exact, *rest = result.rows
    assert exact.spec == "none"
    return {("none", "shipped"): exact, **dict(zip(keys, rest, strict=True))}


def test_exact_cache_is_exact(rows):
    exact = rows["none", "shipped"]
    assert exact.kl_mean < 1e-9 and exact.top1 == 100


@pytest.mark.parametrize(("spec", "bound"), [
    ("int:bits=8", 0.0005), ("turboquant:bits=4", 0.006), ("turboquant:bits=3", 0.025),
    ("trellis:bits=4", 0.0006), ("trellis:bits=3", 0.0027), ("trellis:bits=2", 0.0165),
])  # fmt: skip
def test_mean_kl_is_within_its_bound(rows, spec, bound):
    assert 0 < rows[spec, "shipped"].kl_mean <= bound


def test_the_first_key_as_a_base_stands_in_for_sinks(rows):
    """Sinks inside the text resemble it, and so does the first token itself."""
    kl = rows["trellis:bits=2", "shipped"].kl_mean
    assert kl < rows[WITHOUT_SINKS, "shipped"].kl_mean < 2.5 * kl


def test_four_bits_change_perplexity_by_less_than_one_percent(rows):
    assert abs(rows["turboquant:bits=4", "shipped"].perplexity_change) < 1


@pytest.mark.parametrize("spec", ["turboquant:bits=3,center=64", "kvarn:bits=3"])
def test_better_than_plain_turboquant_at_three_bits(rows, spec):
    assert rows[spec, "shipped"].kl_mean < rows["turboquant:bits=3", "shipped"].kl_mean


@pytest.mark.parametrize("spec", SPECS)
def test_sinks_window_and_exact_chunks_each_help(rows, spec):
    modes = ("shipped", "pure", "packed only")
    shipped, pure, packed = (rows[spec, mode].kl_mean for mode in modes)
    assert shipped < pure < packed


def test_bits_per_value_are_those_of_the_format(rows):
    assert rows["turboquant:bits=4", "pure"].slot_bits_per_value == pytest.approx(4.25)
    assert rows["int:bits=8", "pure"].slot_bits_per_value == pytest.approx(8.5)
