"""Pages that sequences share, and the views that attend over them."""
