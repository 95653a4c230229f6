"""Quantisers: values to codes and side information."""
