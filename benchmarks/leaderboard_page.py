"""The leaderboard as one page of HTML that needs no other file.

    python benchmarks/leaderboard_page.py [--results DIR] [--out build/leaderboard/index.html]

All figures and sentences of the page come out of the JSON files in DIR
(benchmarks/results/leaderboard), which `leaderboard.py` writes. How kvpact stands is printed, too.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import Any

from leaderboard_contenders import LEFT_OUT, contender, points
from leaderboard_style import SCRIPT, STYLE
from leaderboard_table import (
    MODELS,
    Row,
    contexts_of,
    figure,
    load,
    measures,
    middle,
    models_of,
    ranked,
    rows_of,
    verdicts,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "leaderboard"
PAGE = HERE.parent / "build" / "leaderboard" / "index.html"


def cell(value: float, text: str, spread: tuple[float, float] | None = None) -> str:
    """Return a cell that sorts by its value, with quartiles below it."""
    small = f"<small>{spread[0]:.2f}–{spread[1]:.2f}</small>" if spread else ""
    return f'<td data-value="{value!r}">{text}{small}</td>'


def line(row: Row, contexts: list[int]) -> str:
    """Return a row of a table."""
    timed = [row.steps[count] for count in contexts] + [row.prompt]
    at = contexts[len(contexts) // 2]
    kind = ' class="own"' if row.own else ""
    name = f"{escape(row.package)} {escape(row.version)}"
    cells = [
        f'<th scope="row">{escape(row.cache)}<small>{name}</small></th>',
        cell(row.kl, f"{figure(row.kl)}<small>± {figure(row.kl_se)}</small>"),
        cell(row.kl_p99, figure(row.kl_p99)),
        cell(row.top1, f"{row.top1:.1f}"),
        cell(row.bits[at], f"{row.bits[at]:.2f}"),
        *(cell(mid, f"{mid:.2f}", (low, high)) for low, mid, high in timed),
    ]
    return f"<tr{kind}>{''.join(cells)}</tr>"


def table(rows: list[Row]) -> str:
    """Return the table of one model."""
    contexts = contexts_of(rows)
    titles = ["KL, mean", "KL, 99th percentile", "same top token, %"]
    titles += [f"bits held a value, {middle(rows):,} tokens"]
    titles += [f"decode, {count:,} tokens" for count in contexts] + ["prompt, one call"]
    buttons = "".join(f"<th><button>{title}</button></th>" for title in ("cache", *titles))
    body = "\n".join(line(row, contexts) for row in sorted(rows, key=lambda row: row.kl))
    return (
        f'<div class="wide"><table class="sorts"><thead><tr>{buttons}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def standing(rows: list[Row]) -> str:
    """Return a table of kvpact's places, and what the figures say in sentences."""
    lines = []
    for measure in measures(rows):
        first, best, place = ranked(rows, measure)
        mine = "" if best is None else f"{escape(best.cache)}: {measure.text(measure.of(best))}"
        lead = f"{escape(first.name)}: {measure.text(measure.of(first))}"
        what = f'<th scope="row">{measure.title}</th><td>{place or "–"} of {len(rows)}</td>'
        lines.append(f"<tr>{what}<td>{mine}</td><td>{lead}</td></tr>")
    head = "<tr><th>measure</th><th>place</th><th>kvpact's best</th><th>first</th></tr>"
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdicts(rows))
    return (
        f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'
        f"</div><ul>{said}</ul>"
    )


def packages(found: list[dict[str, Any]]) -> str:
    """Return what was changed in each package, and what a reader has to know of it."""
    lines = []
    for one in found:
        changed = escape(one["changed"]) or "nothing"
        name = f"{escape(one['package'])} {escape(one['version'])}"
        note = escape(one["note"])
        lines.append(f'<tr><th scope="row">{name}</th><td>{changed}</td><td>{note}</td></tr>')
    head = "<tr><th>package</th><th>changed to make it run</th><th>to know</th></tr>"
    return (
        f'<div class="wide"><table class="text"><thead>{head}</thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def absent(found: list[dict[str, Any]]) -> str:
    """Return what did not run, and what can't stand in the table."""
    said = [
        f"<b>{escape(one['package'])} {escape(one['version'])}</b>, {escape(row['cache'])}, "
        f"on {MODELS.get(row['model'], row['model'])}: <code>{escape(row['reason'])}</code>"
        for one in found
        for row in one["failed"]
    ]
    waiting = {contender(name).package for name in points()} - {one["package"] for one in found}
    reasons = dict.fromkeys(sorted(waiting), "has an adapter, and was not measured") | LEFT_OUT
    said += [f"<b>{escape(name)}</b>: {escape(why)}" for name, why in reasons.items()]
    return "<ul>" + "".join(f"<li>{sentence}</li>" for sentence in said) + "</ul>"


def method(found: list[dict[str, Any]]) -> str:
    """Return how it was measured."""
    runs: dict[str, list[str]] = {}
    for one in found:
        runs.setdefault(one["about"]["run"], []).append(one["package"])
    a = found[0]["about"]
    when = "; ".join(f"{run}: {', '.join(sorted(set(names)))}" for run, names in runs.items())
    contexts = ", ".join(f"{count:,}" for count in contexts_of(rows_of(found)))
    return (
        f"<p>The first {a['tokens']:,} tokens of {escape(a['text'])}, in chunks of {a['chunk']}; "
        f"the first chunk is not scored. KL: of the next token, exact cache against this one, "
        f"nats per token. Bits: all tensors that the cache object holds, found by walking it, "
        f"over those of DynamicCache with the same tokens, times 32 (the models are in fp32, so "
        f"exact tokens and scales of many packages count 32 bits). Times: seconds on the CPU over "
        f"DynamicCache's, the two taking turns in one process; medians of {a['rounds']} steps, "
        f"and of {a['rounds']} prompts of {a['prompt']:,} tokens, each one call on an empty cache; "
        f"quartiles below. Contexts: {contexts} "
        f"tokens, random but for the last 64. "
        f"No measured step is one in which a package quantises its exact tokens. "
        f"{a['threads']} thread, "
        f"{escape(a['processor'])}, {a['cores']} cores; kvpact {a['kvpact']}, torch {a['torch']}, "
        f"transformers {a['transformers']}.</p><p>Measured: {escape(when)} (UTC).</p>"
    )


def page(found: list[dict[str, Any]]) -> str:
    """Return the page."""
    rows = rows_of(found)
    parts = []
    for model in models_of(rows):
        of_model = [row for row in rows if row.model == model]
        title = MODELS.get(model, model)
        parts.append(f'<section id="{model}"><h2>{title}</h2>{table(of_model)}')
        parts.append(f"<h3>Where kvpact stands on {title}</h3>{standing(of_model)}</section>")
    places = " · ".join(f'<a href="#{m}">{MODELS.get(m, m)}</a>' for m in models_of(rows))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KV caches for transformers, measured</title><style>{STYLE}</style></head>\n"
        f"<body><h1>KV caches for transformers, measured</h1><p>{places} · "
        '<a href="#packages">packages</a> · <a href="#method">method</a></p>'
        "<p>Less is better in every column but the top token's. A heading sorts; kvpact's own "
        f"rows are marked.</p>\n{''.join(parts)}\n"
        f'<section id="packages"><h2>Packages</h2>{packages(found)}'
        f"<h3>Not in the tables</h3>{absent(found)}</section>"
        f'<section id="method"><h2>How it was measured</h2>{method(found)}'
        "<p><code>make leaderboard-run</code> measures anew, <code>make leaderboard</code> makes "
        "this page. docs/extend/leaderboard.md tells how to add a row.</p></section>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def main() -> None:
    """Write the page, and print how kvpact stands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    found = load(options.results)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(found), "utf-8")
    rows = rows_of(found)
    for model in models_of(rows):
        of_model = [row for row in rows if row.model == model]
        print(f"\n{MODELS.get(model, model)}")
        for measure in measures(of_model):
            first, best, place = ranked(of_model, measure)
            mine = "" if best is None else f"{best.cache} {measure.text(measure.of(best))}"
            lead = f"{first.name} {measure.text(measure.of(first))}"
            print(f"- {measure.title}: place {place} of {len(of_model)} ({mine}; first: {lead})")
        print("\n".join(f"- {sentence}" for sentence in verdicts(of_model)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
