"""Write the parts of these pages that come from code and committed results.

    python docs/generate.py            # writes what differs
    python docs/generate.py --check    # names it, and exits with 1

Tables, method cards and pictures are made of the docstrings and dataclasses of the package, of the
JSON below ``benchmarks/results``, of real caches that are driven through appends and rollbacks, and
of the tests that a support matrix names. A page holds them between two comments, so that it can be
read without building the site.
"""

from __future__ import annotations

import sys

from kvpact_pages.pages import DOCS, expected


def main() -> int:
    """Write or check; return the exit status."""
    check = "--check" in sys.argv[1:]
    stale = {
        path: text
        for path, text in expected().items()
        if not path.exists() or path.read_text("utf-8") != text
    }
    for path, text in stale.items():
        print(f"{'differs' if check else 'wrote'}: {path.relative_to(DOCS)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    if check and stale:
        print("run `python docs/generate.py` and commit what it writes")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
