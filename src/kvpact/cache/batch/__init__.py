"""Caches whose rows lie side by side: contiguous ones and those of MLA latents."""
