"""Gemma 3 270M, the second real model: sliding windows, one KV head of 256 (`make test-slow`)."""

import pytest

from kvpact.data import book_path
from kvpact.errors import BackendUnavailable
from kvpact.evaluate import evaluate_text
from kvpact.integrations.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TRELLISES = {"trellis:bits=4": 0.0003, "trellis:bits=3": 0.0010, "trellis:bits=2": 0.0050}
"""Specs and bounds of their mean KL."""


@pytest.fixture(scope="module")
def result():
    try:
        model, tokenizer = load_model("gemma3")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    text = book_path().read_text("utf-8")
    specs = ["turboquant:bits=4", "int:bits=8", *TRELLISES]
    return evaluate_text(model, specs, text, tokenizer=tokenizer, tokens=1536)


def test_perplexity_is_that_of_the_model(result):
    assert result.protocol.reference_perplexity == pytest.approx(33.5036, rel=1e-3)


def test_full_attention_is_compressed_and_sliding_windows_are_not(result):
    exact, four, eight, *_ = result.rows
    assert {(row.layers_compressed, row.layers_native) for row in result.rows} == {(3, 15)}
    assert exact.kl_max < 1e-9
    assert 1e-6 < eight.kl_mean < 2e-4
    assert 2e-3 < four.kl_mean < 1.5e-2


@pytest.mark.parametrize("spec", TRELLISES)
def test_trellises_are_within_their_bounds(result, spec):
    (row,) = (row for row in result.rows if row.spec == spec)
    assert 0 < row.kl_mean <= TRELLISES[spec]
