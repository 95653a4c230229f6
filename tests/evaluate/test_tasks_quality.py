"""Free running and tasks on the real model (`make test-slow`)."""

import pytest
import torch

from kvpact.data import book_path
from kvpact.evaluate import free_running, make_cases, score_tasks
from kvpact.integrations.models import first_tokens, load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SPECS = ["none", "turboquant:bits=4", "int:bits=2"]


@pytest.fixture(scope="module")
def smollm2():
    torch.manual_seed(0)
    return load_model()


@pytest.fixture(scope="module")
def book():
    return book_path().read_text("utf-8")


def test_two_bits_lose_answers_and_four_hardly_do(smollm2, book):
    model, tokenizer = smollm2

    def count(text):
        return len(tokenizer(text)["input_ids"])

    tasks = ["needle", "variables", "common words", "key-value"]
    cases = make_cases(book, count, tokens=768, samples=1, tasks=tasks)
    result = score_tasks(model, tokenizer, cases, SPECS)
    none, four, two = (row for row in result.rows() if row.task is None)
    assert none.questions == 20 and none.exact_correct >= 15
    assert abs(none.difference) < 1e-4
    assert -1 < four.difference < 0.2
    assert two.difference < -1.5


def test_free_running_of_a_real_text(smollm2, book):
    model, tokenizer = smollm2
    prompt = first_tokens(tokenizer, book, 512)
    none, four, two = free_running(model, prompt, SPECS, steps=48).rows
    assert none.first_divergence is None and none.kl_mean < 1e-9
    assert 0 < four.kl_mean < 0.01
    assert two.kl_mean > 10 * four.kl_mean and two.first_divergence is not None
