"""What ``llama-cpp.md`` takes from committed measurements."""

from __future__ import annotations

from typing import Any

from kvpact_pages.results import NARROW, kl, load, table

FILE = "llama/builds.json"


def builds() -> str:
    """Return the table of builds, and on what they were measured."""
    found, cells = load(FILE), []
    for x in sorted(found["rows"], key=_order):
        if x["refused"]:
            cells.append([x["build"], "", "", f"no: {x['refused']}", "", "", "", "", ""])
            continue
        cells.append(
            [
                x["build"], x["ggml"], str(x["interface"]), "yes", f"{x['tokens']:,}",
                _times(x, "prompt"), _times(x, "step"), f"{x['attentions']:,}", kl(x["kl"]),
            ]
        )  # fmt: skip
    columns = ("build", "ggml", "interface", "loads", "after", "ms a token of the prompt",
               "ms a step", "attentions", "KL")  # fmt: skip
    about = found["about"]
    machine = (
        f"{about['model']}, cache of {about['cache']}, {about['threads']} thread; "
        f"{about['processor']}, {about['cores']} cores. Milliseconds are of the processor, since "
        "other programs ran as well; the two of a row were taken in turns, first without kvpact."
    )
    return f"{table(columns, cells, left=4)}\n\n{machine}"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows are ordered by: package, version of ggml, tokens."""
    return row["build"].split()[0], _number(row.get("ggml", "0")), row["tokens"]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _times(row: dict[str, Any], name: str) -> str:
    """Return a time without kvpact, with it, and the second over the first."""
    own, ours = row[name], row[f"kvpact_{name}"]
    return f"{own:.1f} → {ours:.1f}{NARROW}({ours / own:.2f})"


def versions() -> str:
    """Return the sentence on the versions of ggml that were tried."""
    rows = [x for x in load(FILE)["rows"] if not x["refused"]]
    numbers = sorted({x["ggml"] for x in rows}, key=_number)
    interfaces = sorted({x["interface"] for x in rows})
    return (
        f"Tried with models: ggml {', '.join(numbers[:-1])} and {numbers[-1]}, of the interfaces "
        f"{' and '.join(map(str, interfaces))}. Others are tried when they are loaded."
    )


def gains() -> str:
    """Return what share of llama.cpp's time is left, by the length of the context."""
    rows = [x for x in load(FILE)["rows"] if not x["refused"]]
    parts = []
    for tokens in sorted({x["tokens"] for x in rows}):
        same = [x for x in rows if x["tokens"] == tokens]
        shares = (
            sorted(f"{x[f'kvpact_{name}'] / x[name]:.2f}" for x in same)
            for name in ("prompt", "step")
        )
        prompt, step = (" to ".join(dict.fromkeys((x[0], x[-1]))) for x in shares)
        parts.append(f"with {tokens:,} tokens a prompt takes {prompt} and a step {step}")
    return f"Of llama.cpp's time, {'; '.join(parts)} ([the table](#builds-that-people-have))."


BLOCKS = {"llama-builds": builds, "llama-versions": versions, "llama-gains": gains}
