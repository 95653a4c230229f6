"""Engines' own pages that hold packed slots: their bytes, and attention over them."""
