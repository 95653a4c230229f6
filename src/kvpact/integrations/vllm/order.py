"""In which order the sequences of a batch attend and store.

vLLM offers a page to other sequences as soon as it has scheduled the tokens that fill it. So one
sequence of a batch may begin with tokens that another one of the same batch has yet to store.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.integrations.vllm.window import Row


def waves(rows: Sequence[Row], page_tokens: int) -> list[list[Row]]:
    """Return the rows of a batch in parts, of which each reads what the earlier ones stored.

    `rows`: of one batch, in any order. Returns one part, nearly always; within a part no row reads
    a page that another one fills.
    """
    parts, left = [], list(rows)
    while left:
        filled = {
            page
            for row in left
            for page in row.pages[row.held // page_tokens : row.length // page_tokens]
        }
        # Only whole pages are shared. A sequence that reads another's page is the longer one, so
        # there is always a row that reads none.
        ready = [row for row in left if filled.isdisjoint(row.pages[: row.held // page_tokens])]
        parts.append(ready)
        left = [row for row in left if row not in ready] if len(ready) < len(left) else []
    return parts
