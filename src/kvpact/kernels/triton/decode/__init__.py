"""Decoding on the device."""
