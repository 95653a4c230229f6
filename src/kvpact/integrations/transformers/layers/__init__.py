"""Layers of transformers' caches over kvpact's: full and sliding attention, latents, indexed, values alone."""
