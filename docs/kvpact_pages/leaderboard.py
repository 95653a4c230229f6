"""What ``leaderboard.md`` takes from the runs that ``make leaderboard-run`` committed."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from kvpact.evaluate.runner import TOKENS
from kvpact_pages.results import FOLDER, MODELS, NARROW, ROOT, code, table

sys.path.insert(0, str(ROOT / "benchmarks"))

from leaderboard_contenders import LEFT_OUT
from leaderboard_table import Row, contexts_of, figure, kl_about, load, middle, models_of, rows_of

CHUNK = 256
"""Of all runs; see ``benchmarks/leaderboard.py``."""


@cache
def found() -> list[dict[str, Any]]:
    """Return what was found of each package."""
    return load(FOLDER / "leaderboard")


def tables() -> str:
    """Return the caches of each model in the order of their KL."""
    rows, parts = rows_of(found()), []
    contexts = contexts_of(rows)
    for model in models_of(rows):
        here = sorted((row for row in rows if row.model == model), key=lambda row: row.kl)
        columns = ("cache", "KL", "KL p99", "top-1", "bits held")
        columns += (*(f"step, {n:,}" for n in contexts), "prompt")
        about = kl_about(found()[0], model)
        scored = f"KL of {about['tokens'] - CHUNK - 1:,} scored tokens"
        older = ", an older measurement than that of the other pages" * (about["tokens"] != TOKENS)
        lines = table(columns, [_cells(row, contexts) for row in here])
        parts += [f"## {MODELS[model]}", f"{scored}{older}:", lines]
    return "\n\n".join(parts)


def _cells(row: Row, contexts: list[int]) -> list[str]:
    times = [*(row.steps[count][1] for count in contexts), row.prompt[1]]
    other = f"{row.cache} ({row.package} {row.version})"
    kl = f"{figure(row.kl)}{NARROW}±{NARROW}{figure(row.kl_se)}"
    bits = f"{row.bits[contexts[len(contexts) // 2]]:.2f}"
    name = f"**{row.cache}**" if row.own else other
    first = [name, kl, figure(row.kl_p99), f"{row.top1:.1f}", bits]
    return [*first, *(f"{time:.2f}" for time in times)]


def method() -> str:
    """Return how it was measured."""
    runs: dict[str, list[str]] = {}
    a = found()[0]["about"]
    for one in found():
        other = one["about"]["processor"]
        where = f" (on {other})" if other != a["processor"] else ""
        runs.setdefault(one["about"]["run"] + where, []).append(one["package"])
        for model, k in one["about"].get("kl", {}).items():
            anew = f"KL on {MODELS[model]}, {k['run']}, transformers {k['transformers']}"
            runs.setdefault(anew, []).append(one["package"])
    when = "; ".join(f"{run}: {', '.join(sorted(set(names)))}" for run, names in runs.items())
    return (
        f"KL is of the first tokens of {a['text']}, teacher-forced in chunks of {a['chunk']}; the "
        "first chunk and the last token are not scored. *Bits held* are all "
        "tensors of the cache object, found by walking "
        f"it, at {middle(rows_of(found())):,} tokens, over those of `DynamicCache`, times 32: the "
        "models are in fp32, so exact tokens and scales of many packages count 32 bits. *Step* is "
        "a decode step after so many tokens, random but for the last 64; *prompt* is one call of "
        f"{a['prompt']:,} tokens on an empty cache. Both are medians of {a['rounds']} rounds of "
        "seconds on the CPU, the two caches taking turns in one process. In no measured step a "
        "package quantises its exact tokens.\n\n"
        f"{a['threads']} thread, {a['processor']}, {a['cores']} cores; kvpact {a['kvpact']}, torch "
        f"{a['torch']}, transformers {a['transformers']}. Measured (UTC): {when}."
    )


def packages() -> str:
    """Return what was changed in each package, what is to be known, and what did not run."""
    cells = [
        [f"{one['package']} {one['version']}", one["changed"] or "nothing", one["note"]]
        for one in found()
    ]
    said = [
        f"**{one['package']} {one['version']}**, {row['cache']}, on {MODELS[row['model']]}: "
        f"{code(row['reason'])}"
        for one in found()
        for row in one["failed"]
    ]
    said += [f"**{name}**: {why}" for name, why in LEFT_OUT.items()]
    columns = ("package", "changed to make it run", "to know")
    missing = "\n".join(f"- {sentence}" for sentence in said)
    return "\n\n".join([table(columns, cells, left=3), "Not in the tables:", missing])


BLOCKS = {
    "leaderboard-tables": tables,
    "leaderboard-method": method,
    "leaderboard-packages": packages,
}
