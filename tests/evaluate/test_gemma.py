"""Gemma 3 270M, the second real model: sliding windows, one KV head of 256 (`make test-slow`)."""

import pytest

from kvpact.data import book_path
from kvpact.errors import BackendUnavailable
from kvpact.evaluate import evaluate_text
from kvpact.integrations.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def result():
    try:
        model, tokenizer = load_model("gemma3")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    text = book_path().read_text("utf-8")
    specs = ["turboquant:bits=4", "int:bits=8"]
    return evaluate_text(model, tokenizer, text, specs, tokens=1536)


def test_perplexity_is_that_of_the_model(result):
    assert result.protocol.reference_perplexity == pytest.approx(33.5036, rel=1e-3)


def test_full_attention_is_compressed_and_sliding_windows_are_not(result):
    exact, four, eight = result.rows
    assert {(row.layers_compressed, row.layers_native) for row in result.rows} == {(3, 15)}
    assert exact.kl_max < 1e-9
    assert 1e-6 < eight.kl_mean < 2e-4
    assert 2e-3 < four.kl_mean < 1.5e-2
