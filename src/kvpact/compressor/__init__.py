"""Compression of K and V as a whole, and back: tensors, sequences of caches, files."""

from kvpact.compressor.compressed import CompressedKV, KVError
from kvpact.compressor.compressor import KVCacheCompressor

__all__ = ["CompressedKV", "KVCacheCompressor", "KVError"]
