"""One layer of a cache: its state, the way tokens come in, and how it is saved."""
