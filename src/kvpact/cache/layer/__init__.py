"""What one layer of a cache holds, how tokens come in, and how it is saved."""
