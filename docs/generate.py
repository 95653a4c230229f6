"""Write the parts of these pages that come from code and committed results.

    python docs/generate.py

Tables, method cards and pictures are made of the docstrings and dataclasses of the package, of the
JSON below ``benchmarks/results``, of real caches that are driven through appends and rollbacks, and
of the tests that a support matrix names. A page holds them between two comments, so that it can be
read without building the site. ``tests/docs`` tells what is out of date.
"""

from kvpact_pages.pages import DOCS, stale

for path, text in stale().items():
    path.write_text(text, "utf-8")
    print(f"wrote: {path.relative_to(DOCS.parent)}")
