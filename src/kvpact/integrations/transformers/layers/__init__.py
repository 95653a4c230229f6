"""Layers of transformers' caches over kvpact's, one kind of attention per file."""
