"""Kernels are interpreted here; `triton.jit` decides it when kernels are imported."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
