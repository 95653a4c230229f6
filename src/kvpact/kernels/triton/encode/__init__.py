"""Encoding on the device."""
