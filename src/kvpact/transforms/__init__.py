"""Orthogonal transforms."""

from kvpact.transforms.base import IDENTITY, Identity, Transform
from kvpact.transforms.hadamard import RandomHadamard

__all__ = ["IDENTITY", "Identity", "RandomHadamard", "Transform"]
