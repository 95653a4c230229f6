"""Attention on integer tensor cores: its coverage of slots, and its one loop."""
