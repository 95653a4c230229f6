"""Engines in front of kvpact; each module is imported only by who uses that engine."""
