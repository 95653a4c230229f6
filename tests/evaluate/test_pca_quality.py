"""`pca` on the real model, calibrated on texts of another kind (`make test-slow`)."""

from pathlib import Path

import pytest
import torch

from kvpact import parse_spec
from kvpact.data import book_path
from kvpact.evaluate import Candidate, evaluate_text
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import calibrate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
TEXTS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
BOUNDS = {"pca:bits=2": 0.0070, "pca:bits=1.5": 0.0170, "pca:bits=1": 0.0335}


@pytest.fixture(scope="module")
def rows():
    """The book, 1,000 tokens in chunks of 256."""
    model, tokenizer = load_model()
    texts = [(ROOT / name).read_text("utf-8") for name in TEXTS]
    ids = [torch.tensor(tokenizer(text)["input_ids"][:1024]) for text in texts]
    calibration = calibrate(model, ids, [parse_spec("pca")])
    candidates = [Candidate(spec, calibration=calibration) for spec in BOUNDS]
    text = book_path().read_text("utf-8")
    result = evaluate_text(model, candidates, text, tokenizer=tokenizer, tokens=1000, chunk=256)
    return {row.spec: row for row in result.rows}


@pytest.mark.parametrize("spec", BOUNDS)
def test_mean_kl_is_within_its_bound(rows, spec):
    assert 0 < rows[spec].kl_mean <= BOUNDS[spec]
