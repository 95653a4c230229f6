"""What Sphinx needs to build this site, beside its own extensions."""
