"""Method cards: docstring, options, bits, measured KL, who computes, when not to use it."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvpact.cli.methods_data import meanings, option_text, slot_bits
from kvpact.kernels.base import OPERATIONS
from kvpact.kernels.plan import BACKENDS
from kvpact.methods import Codec
from kvpact.methods.cautions import cautions
from kvpact.methods.fitted import FittedCodec
from kvpact.registry import Alias, Foreign, find_method, known_names, list_methods
from kvpact.spec import parse_spec
from kvpact_pages.results import (
    MODELS,
    NARROW,
    code,
    eval_files,
    kl_and_error,
    load,
    percent,
    table,
)

ADVICE = tomllib.loads((Path(__file__).parent / "advice.toml").read_text("utf-8"))
WRITTEN = "<!-- Written by docs/generate.py: change the method's docstring or advice.toml. -->"
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
_DOES = {"attend": "attends to", "encode": "packs", "decode": "unpacks"}


def methods() -> dict[str, Any]:
    """Return the package's own methods by name, in the order in which advice is given."""
    found = {n: m for n, m in list_methods().items() if not isinstance(m, Alias)}
    own = {n: m for n, m in found.items() if m.__module__.startswith("kvpact.methods")}
    return {name: own[name] for name in sorted(own, key=lambda n: [*ADVICE, n].index(n))}


def linked(text: str) -> str:
    """Return text whose papers are links."""
    return _PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def summary(method: Any) -> str:
    """Return the first line of a method's docstring."""
    return inspect.cleandoc(method.__doc__).partition("\n")[0]


def codecs(method: Any, dim: int = 128) -> tuple[Codec, Codec]:
    """Return the codecs for K and V at a method's defaults."""
    made = method()
    return made.key_codec(dim, torch.float16), made.value_codec(dim, torch.float16)


def computes(method: Any, backend: str) -> str:
    """Return what a backend computes of a method's slots, and why not the rest."""
    kernel = next(one for one in BACKENDS if one.name == backend)
    done: list[str] = []
    missing: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        reasons = [kernel.covers(operation, codec, torch.float16) for codec in codecs(method)]
        for side, reason in zip("KV", reasons, strict=True):
            if reason:
                missing.setdefault(side, []).append(_DOES[operation])
        if not any(reasons):
            done.append(_DOES[operation])
    if not missing:
        return "all of it"
    if len(missing) == 2 and not done:
        return "none of it: torch computes"
    of_torch = {
        side: "computes" if len(does) == len(OPERATIONS) else " and ".join(does)
        for side, does in missing.items()
    }
    return "; ".join([*done, *(f"torch {does} {side}" for side, does in of_torch.items())])


def learns(method: Any) -> str:
    """Return what a method learns, in words."""
    pair = codecs(method)
    if not any(isinstance(codec, FittedCodec) for codec in pair):
        return "nothing"
    count = max(codec.learns_from for codec in pair)
    first = f"from the first {count} tokens" if count else "from the tokens that are packed first"
    return f"{first}, or from a calibration; pages and stored prefixes need the calibration"


def groups(method: Any) -> str:
    """Return how many tokens are packed together."""
    pair = codecs(method)
    if all(codec.joint for codec in pair):
        return "all heads of a token together"
    key, value = (codec.group for codec in pair)
    words = {True: "each token at once", False: "{} tokens together"}
    sides = [words[size == 1].format(size) for size in (key, value)]
    return sides[0] if key == value else f"K {sides[0]}, V {sides[1]}"


def bits_text(method: Any, dim: int) -> str:
    """Return the bits of a method's slots at a width, K and V apart where they differ."""
    key, value = slot_bits(method, method, dim)
    return f"{key:.4g}" if key == value else f"{key:.4g}{NARROW}/{NARROW}{value:.4g}"


def facts(method: Any) -> str:
    """Return the table at the head of a card."""
    rows = [
        ["paper", linked(getattr(method, "paper", "")) or "none of its own"],
        ["bits a value of the slots", f"{bits_text(method(), 128)} at the defaults and width 128"],
        ["packs", groups(method)],
        ["learns", learns(method)],
        ["native kernels on CPUs", computes(method, "cpu")],
        ["Triton kernels on GPUs", computes(method, "triton")],
    ]
    return table(("", ""), rows, left=2)


def options(method: Any) -> str:
    """Return the options with their meanings."""
    told = meanings(method)
    rows = []
    for field in fields(method):
        kind, meaning = told.get(field.name, ("", ""))
        meaning += " Of K alone." if field.name in method.key_only else ""
        rows.append([code(field.name), code(option_text(field.default)), *_escaped(kind, meaning)])
    return table(("option", "default", "type", "meaning"), rows, left=4)


def _escaped(*cells: str) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


def specs(method: Any) -> list[str]:
    """Return the specs that a method names, and those that were measured."""
    named = [*getattr(method, "examples", {}), *getattr(method, "variants", {})]
    return list(dict.fromkeys([*named, *(row["spec"] for row in measured(method.name))]))


def bits(method: Any) -> str:
    """Return the bits of the specs that a method names, at two widths."""
    plain = [s for s in specs(method) if "sinks" not in s and "window" not in s and "/" not in s]
    made = {spec: parse_spec(spec).key for spec in plain}
    rows = [[code(s), bits_text(m, 64), bits_text(m, 128)] for s, m in made.items()]
    return table(("spec", "D = 64", "D = 128"), rows)


def measured(name: str) -> list[dict[str, Any]]:
    """Return what was measured of a method: the best protocol of each spec and model."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    order = sorted(eval_files(), key=lambda file: (not file.startswith("models/"), file))
    for file in order:
        for row in load(file):
            if row["packed_only"] or "sinks=0,window=0" in row["spec"]:
                continue
            if parse_spec(row["spec"]).key.name == name:
                found.setdefault((row["spec"], row["model"]), {**row, "file": file})
    return sorted(found.values(), key=lambda row: (row["model"], row["kl_mean"]))


def quality(name: str) -> str:
    """Return the measured tables of a method, one for each model."""
    parts = []
    for model, said in MODELS.items():
        rows = [row for row in measured(name) if row["model"] == model]
        cells = [[code(row["spec"]), *_figures(row)] for row in rows]
        if cells:
            columns = ("spec", "bits, slots", "KL mean", "top-1", "tokens")
            parts += [f"On {said}:", table(columns, cells)]
    return "\n\n".join(parts) or "Nothing is committed; `kvpact eval` measures it."


def _figures(row: dict[str, Any]) -> list[str]:
    file = row["file"].replace(".json", ".md")
    return [
        f"{row['slot_bits_per_value']:.2f}",
        kl_and_error(row),
        percent(row["top1"]),
        f"[{row['tokens']:,}](../../benchmarks/results/{file})",
    ]


def warnings(method: Any) -> str:
    """Return what is known to do badly, with the specs that it is about."""
    about: dict[str, list[str]] = {}
    for spec in specs(method):
        for line in cautions(parse_spec(spec)):
            about.setdefault(line, []).append(code(spec))
    lines = [f"- {line}" for line in ADVICE[method.name]["avoid"]]
    for line, named in about.items():
        shown = ", ".join(named[:4]) + (" and others" if len(named) > 4 else "")
        lines.append(f"- {shown}: {line}.")
    return "\n".join(lines)


def card(method: Any) -> str:
    """Return the page of a method."""
    text = linked(inspect.cleandoc(sys.modules[method.__module__].__doc__ or ""))
    parts = [
        WRITTEN,
        f"# `{method.name}`",
        f"{summary(method)} {ADVICE[method.name]['use']}",
        facts(method),
        "## What it does",
        text,
        "## Options",
        options(method),
        "## Bits",
        "Bits a value of packed codes and side information, K and V apart by a slash where they "
        "differ; exact sinks and window, and what is learnt, come on top.",
        bits(method),
        "## Measured",
        "Mean KL in nats per token against the exact cache, with its standard error, on the "
        "shipped novel ([how it is measured](../quality.md)).",
        quality(method.name),
        "How fast methods are: [Speed](../speed.md).",
        "## When not to use it",
        warnings(method),
        f"The same on the command line: `kvpact methods {method.name}`.",
    ]
    return "\n\n".join(parts) + "\n"


def overview() -> str:
    """Return the table of all methods."""
    rows = [
        [
            f"[`{name}`]({name}.md)",
            summary(method),
            linked(getattr(method, "paper", "")),
            bits_text(method(), 128),
            "yes" if computes(method, "cpu") == "all of it" else "no",
        ]
        for name, method in methods().items()
    ]
    return table(("method", "what it is", "paper", "bits, width 128", "native"), rows, left=5)


def best() -> str:
    """Return the spec with the least KL on each model, of all that were measured at most bits."""
    limits = (2.5, 3.5, 4.5, 9.0)
    rows = []
    for limit, below in zip(limits, (0.0, *limits), strict=False):
        cells = [f"{below:g} to {limit:g}" if below else f"up to {limit:g}"]
        for model in MODELS:
            found = [
                row
                for row in load(f"models/{model}/eval.json")
                + (load("quality/eval.json") if model == "smollm2" else [])
                if below < row["slot_bits_per_value"] <= limit and not row["packed_only"]
            ]
            least = min(found, key=lambda row: row["kl_mean"], default=None)
            cells.append(f"`{least['spec']}`, {kl_and_error(least)}" if least else "not measured")
        rows.append(cells)
    return table(("bits of the slots", *MODELS.values()), rows, left=3)


def aliases() -> str:
    """Return the table of aliases."""
    found = {n: m for n, m in list_methods().items() if isinstance(m, Alias)}
    return table(("alias", "stands for"), [[code(n), code(a.spec)] for n, a in found.items()], 2)


def foreign() -> str:
    """Return the table of names that are refused."""
    found = {name: find_method(name) for name in known_names()}
    rows = [
        [code(name), entry.difference, code(entry.nearest)]
        for name, entry in found.items()
        if isinstance(entry, Foreign)
    ]
    return table(("name", "why it is refused", "nearest"), rows, 3)


def toctree() -> str:
    """Return the list of cards, for the site's navigation."""
    return "\n".join(["```{toctree}", ":hidden:", "", *methods(), "```"])


def files() -> dict[str, str]:
    """Return every card by file name."""
    return {f"methods/{name}.md": card(method) for name, method in methods().items()}


BLOCKS = {
    "methods-overview": overview,
    "methods-best": best,
    "methods-aliases": aliases,
    "methods-foreign": foreign,
    "methods-toctree": toctree,
}
