"""The common state of a model's layers: batches, rows, gaps, and tokens on their way into slots."""
