"""What tests of several rooms share."""

import os

# As the Makefile sets them, for pytest on its own: workers whose threads spin while they wait take
# each other's cores. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Without a GPU Triton interprets kernels. It decides when it is imported: by transformers, too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from mooncake_cluster import master, start_master
from redis_server import start_server
from tiny_llama import ascii_tokenizer, tiny_llama

from kvpact.data import book_path
from kvpact.stores import MemoryStore

__all__ = ["master", "start_master", "start_server"]  # fixtures of stores and of the command line


@pytest.fixture
def store():
    with MemoryStore() as held:
        yield held


@pytest.fixture(scope="module")
def book_text(tmp_path_factory):
    """A file with the first 700 characters of the book."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(book_path().read_text("utf-8")[:700], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny Llama and a tokenizer of single ASCII characters."""
    for name in ("tokenizers", "transformers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(1024, bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return str(folder)
