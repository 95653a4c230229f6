"""Orthogonal transforms."""

from kvpact.transforms.base import IDENTITY, NoTransform, Transform
from kvpact.transforms.hadamard import RandomHadamard

__all__ = ["IDENTITY", "NoTransform", "RandomHadamard", "Transform"]
