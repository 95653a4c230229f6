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

from kvpact.cli.methods import meanings, option_text, slot_bits
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
_CALIBRATION = "../quality.md#fewer-bits-for-what-is-stored"
CALIBRATED = "pca/"
"""Folder of the evaluations whose caches had a calibration."""
_DOES = {"attend": "attends to", "encode": "packs", "decode": "unpacks"}
ALL = "all: attend, pack and unpack"
"""What is said of a backend that computes everything."""


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
        return ALL
    if len(missing) == 2 and not done:
        return "none: torch computes"
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
    words = {True: "each token by itself", False: "{} tokens together"}
    sides = [words[size == 1].format(size) for size in (key, value)]
    return sides[0] if key == value else f"K: {sides[0]}; V: {sides[1]}"


def bits_text(method: Any, dim: int) -> str:
    """Return the bits of a method's slots at a width, K and V apart where they differ."""
    key, value = slot_bits(method, method, dim)
    return f"{key:.4g}" if key == value else f"{key:.4g}{NARROW}/{NARROW}{value:.4g}"


def facts(method: Any) -> str:
    """Return the table at the head of a card."""
    rows = [
        ["paper", linked(getattr(method, "paper", "")) or "none"],
        ["bits per value of the slots", f"{bits_text(method(), 128)} at width 128"],
        ["packing", groups(method)],
        ["learnt", learns(method)],
        ["native kernels on CPUs", computes(method, "cpu")],
        ["Triton kernels on GPUs", computes(method, "triton")],
    ]
    return table(("at the defaults", ""), rows, left=2)


def options(method: Any) -> str:
    """Return the options with their meanings."""
    told = meanings(method)
    rows = []
    for field in fields(method):
        kind, meaning = told.get(field.name, ("", ""))
        meaning += " K only." if field.name in method.key_only and "K only" not in meaning else ""
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
    notes = dict.fromkeys(note for m in made.values() for note in unplanned(m))
    return "\n\n".join([table(("spec", "D = 64", "D = 128"), rows), *notes])


def unplanned(method: Any) -> list[str]:
    """Return what of the bytes of a method's slots only the tokens decide."""
    codec = method.key_codec(64, torch.float16)
    told = codec.unplanned if not codec.joint else ""  # joint codecs tell of their state alone
    text = told.partition(": ")[2]
    return [f"{text[0].upper()}{text[1:]}."] if text else []


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
    if any(row["file"].startswith(CALIBRATED) for row in measured(name)):
        parts.append(f"These caches had a [calibration]({_CALIBRATION}).")
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
        "Bits per value of packed codes and side information, for K and V given in 16 bits, with a "
        "slash between K and V where they differ. Exact sinks and window, and what is learnt, come "
        "on top.",
        bits(method),
        "## Measured",
        "Mean KL in nats per token against the exact cache, with its standard error, on the "
        "shipped novel ([how it is measured](../quality.md)); the models run in fp32. *Bits, "
        "slots* are the mean of K and V, and include what was learnt, spread over the tokens.",
        quality(method.name),
        "[Speed](../speed.md) tells how fast methods are.",
        "## When not to use it",
        warnings(method),
        f"`kvpact methods {method.name}` prints text, options and bits on the command line.",
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
            "yes" if computes(method, "cpu") == ALL else "no",
        ]
        for name, method in methods().items()
    ]
    return table(("method", "what it is", "paper", "bits, width 128", "native"), rows, left=5)


def best() -> str:
    """Return the spec with the least KL on each model, of all that were measured, by bits."""
    limits = (2.5, 3.5, 4.5, 9.0)
    every = {model: _of_model(model) for model in MODELS}
    rows = []
    for limit, below in zip(limits, (0.0, *limits), strict=False):
        cells = [f"{below:g} to {limit:g}" if below else f"up to {limit:g}"]
        for model in MODELS:
            found = [row for row in every[model] if below < row["slot_bits_per_value"] <= limit]
            least = min(found, key=lambda row: row["kl_mean"], default=None)
            cells.append(f"`{least['spec']}`, {kl_and_error(least)}" if least else "not measured")
        rows.append(cells)
    return table(("bits per value of the slots", *MODELS.values()), rows, left=3)


def _of_model(model: str) -> list[dict[str, Any]]:
    """Return what was measured on a model without a calibration, each spec once."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(eval_files(), key=lambda file: (not file.startswith("models/"), file)):
        for row in [] if file.startswith(CALIBRATED) else load(file):
            if row["model"] == model and not row["packed_only"]:
                found.setdefault(row["spec"], row)
    return list(found.values())


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
