"""A layer's step in launches that are the same each time."""
