"""Compresses K and V as a whole, and gives them back: tensors, sequences of caches, files."""

from kvpact.compressor.compressed import CompressedKV, KVError
from kvpact.compressor.compressor import KVCacheCompressor

__all__ = ["CompressedKV", "KVCacheCompressor", "KVError"]
