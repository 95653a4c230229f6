"""Kernels in Triton: packed slots on CUDA devices. Imported where they are used."""
