"""The attention that a model calls over compressed layers, and what it sees of weights."""
