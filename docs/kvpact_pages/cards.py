"""Method cards: docstring, options, bits, measured KL, who computes, when not to use it."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from typing import Any

import torch

from kvpact.cli.methods import meanings, option_text, slot_bits
from kvpact.data import method_advice
from kvpact.kernels.base import OPERATIONS
from kvpact.kernels.plan import BACKENDS
from kvpact.methods import Codec
from kvpact.methods.cautions import cautions
from kvpact.methods.fitted import FittedCodec
from kvpact.registry import Alias, Foreign, find_method, known_names, list_methods
from kvpact.spec import Spec, parse_spec
from kvpact_pages import by_model
from kvpact_pages.results import MODELS, NARROW, code, kl, table

ADVICE = method_advice()
WRITTEN = "<!-- Written by docs/generate.py: change the method's docstring or advice.toml. -->"
_PAPER = re.compile(r"(arXiv|doi):(\d{4}\.\d{5}|10\.\S+)")
_PAPERS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
_DOES = {"attend": "attends to", "encode": "packs", "decode": "unpacks"}
OWN_PAGE = ("trellis", "turboquant", "int", "pca")
"""Methods to choose from; the others share a page."""
COMPARED = (
    "These are here because papers, other projects and tests use them; for most models one of "
    "[`trellis`](trellis.md), [`turboquant`](turboquant.md) and [`int`](int.md) is the better "
    "choice. [Methods](index.md) tells how to read a card."
)
ALL = "all: attend, pack and unpack"
"""What is said of a backend that computes everything."""


def methods() -> dict[str, Any]:
    """Return the package's own methods by name, in the order in which advice is given."""
    found = {n: m for n, m in list_methods().items() if not isinstance(m, Alias)}
    own = {n: m for n, m in found.items() if m.__module__.startswith("kvpact.methods")}
    return {name: own[name] for name in sorted(own, key=lambda n: [*ADVICE, n].index(n))}


def page_of(name: str) -> str:
    """Return where a method's card is, from the folder of the cards."""
    return f"{name}.md" if name in OWN_PAGE else f"comparison.md#{name}"


def linked(text: str) -> str:
    """Return text whose papers are links."""
    return _PAPER.sub(lambda paper: f"[{paper[0]}]({_PAPERS[paper[1]]}{paper[2]})", text)


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


def sides(key_method: Any, value_method: Any, dim: int) -> str:
    """Return the bits of slots at a width, K and V apart where they differ."""
    key, value = slot_bits(Spec(key_method, value_method), dim)
    return f"{key:.4g}" if key == value else f"{key:.4g}{NARROW}/{NARROW}{value:.4g}"


def facts(method: Any) -> str:
    """Return the table at the head of a card."""
    rows = [
        ["paper", linked(getattr(method, "paper", "")) or "none"],
        ["bits per value of the slots", f"{sides(method(), method(), 128)} at width 128"],
        ["KL at these bits", loss(method)],
        ["packing", groups(method)],
        ["learnt", learns(method)],
        ["native kernels on CPUs", computes(method, "cpu")],
        ["Triton kernels on GPUs", computes(method, "triton")],
    ]
    return table(("at the defaults", ""), rows, left=2)


def loss(method: Any) -> str:
    """Return what the defaults cost on each model on which they were measured."""
    spec = Spec(method(), method())
    found = [row for row in by_model.measured(method.name) if parse_spec(row["spec"]) == spec]
    found.sort(key=lambda row: [*MODELS].index(row["model"]))
    told = (f"{kl(row['kl_mean'])} ({MODELS[row['model']]})" for row in found)
    return ", ".join(told) or "not measured"


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
    return list(dict.fromkeys([*named, *(row["spec"] for row in by_model.measured(method.name))]))


def bits(method: Any) -> str:
    """Return the bits of the specs that a method names, at two widths."""
    plain = [s for s in specs(method) if "sinks" not in s and "window" not in s and "/" not in s]
    made = {spec: parse_spec(spec).key for spec in plain}
    rows = [[code(s), sides(m, m, 64), sides(m, m, 128)] for s, m in made.items()]
    notes = dict.fromkeys(note for m in made.values() for note in unplanned(m))
    return "\n\n".join([table(("spec", "D = 64", "D = 128"), rows), *notes])


def unplanned(method: Any) -> list[str]:
    """Return what of the bytes of a method's slots only the tokens decide."""
    codec = method.key_codec(64, torch.float16)
    told = codec.unplanned if not codec.joint else ""  # joint codecs tell of their state alone
    text = told.partition(": ")[2]
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def every() -> str:
    """Return the bits of the specs that methods name as examples, by width."""
    rows = []
    for text in (text for method in methods().values() for text in method.examples):
        spec = parse_spec(text)
        rows.append([code(text), *(sides(spec.key, spec.value, dim) for dim in (64, 128))])
    return table(("spec", "width 64", "width 128"), rows)


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


def card(method: Any, level: int = 1) -> str:
    """Return what is told of a method, below a heading of a level."""
    text = linked(inspect.cleandoc(sys.modules[method.__module__].__doc__ or ""))
    parts = [
        f"{'#' * level} `{method.name}`",
        f"{summary(method)} {ADVICE[method.name]['use']}",
        facts(method),
        _part("When not to use it", level),
        warnings(method),
        _part("What it does", level),
        text,
        _part("Options", level),
        options(method),
        _part("Bits", level),
        bits(method),
        _part("Measured", level),
        by_model.of_method(method.name),
    ]
    return "\n\n".join(parts)


def _part(title: str, level: int) -> str:
    """Return the title of a part of a card: a heading on a card's own page alone."""
    return f"## {title}" if level == 1 else f"**{title}**"


def overview() -> str:
    """Return the table of all methods."""
    rows = [
        [
            f"[`{name}`]({page_of(name)})",
            summary(method),
            linked(getattr(method, "paper", "")),
            sides(method(), method(), 128),
            "yes" if computes(method, "cpu") == ALL else "no",
        ]
        for name, method in methods().items()
    ]
    return table(("method", "what it is", "paper", "bits, width 128", "native"), rows, left=5)


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
    return "\n".join(["```{toctree}", ":hidden:", "", *OWN_PAGE, "comparison", "```"])


def files() -> dict[str, str]:
    """Return every card by file name."""
    own = [card(methods()[name]) for name in OWN_PAGE]
    shared = [card(method, 2) for name, method in methods().items() if name not in OWN_PAGE]
    pages = {name: page for name, page in zip(OWN_PAGE, own, strict=True)}
    pages["comparison"] = "\n\n".join(["# Methods to compare with", COMPARED, *shared])
    return {f"methods/{name}.md": f"{WRITTEN}\n\n{page}\n" for name, page in pages.items()}


BLOCKS = {
    "methods-overview": overview,
    "methods-best": by_model.best,
    "methods-aliases": aliases,
    "methods-foreign": foreign,
    "methods-toctree": toctree,
}
