"""What a model's layers hold together: batches, rows, gaps, and tokens on their way into slots."""
