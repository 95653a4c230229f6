"""Attention on integer tensor cores: which slots it covers, and its one loop."""
