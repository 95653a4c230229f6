"""What the documentation takes from code and committed results."""
