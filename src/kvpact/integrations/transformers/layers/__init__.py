"""Layers of transformers' caches over kvpact's: full, sliding, latent, indexed, values alone."""
