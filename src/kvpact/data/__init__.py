"""Files that are shipped with the package."""

from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["book_path"]


def book_path() -> Traversable:
    """Return the excerpt of *Northanger Abbey*; ``book_path().read_text("utf-8")`` reads it."""
    return files(__name__) / "northanger_abbey.txt"
