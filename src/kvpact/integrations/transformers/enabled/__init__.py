"""Models whose callers get compressed caches by themselves, continuous batching included."""
