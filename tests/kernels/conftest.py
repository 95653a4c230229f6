"""Lets the tests here import `compare`, which is a script as well."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def set_threads():
    """Return what sets the number of torch's threads, which is afterwards as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
