"""Comparing what compressors give."""

from kvpact import CompressedKV
from kvpact.testing.held import same_bytes


def same(a: CompressedKV, b: CompressedKV) -> bool:
    """Whether both hold the same tensors under the same names, to the bit."""
    x, y = a.tensors(), b.tensors()
    return x.keys() == y.keys() and all(same_bytes(x[name], y[name]) for name in x)
