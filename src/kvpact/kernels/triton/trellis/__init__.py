"""Trellises in kernels: where codes lie, their numbers, levels, keys, values and bases."""
