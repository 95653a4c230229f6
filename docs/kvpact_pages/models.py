"""Models that people run: what their caches take, from the table that `kvpact size` reads."""

from __future__ import annotations

from kvpact.data import model_table
from kvpact.integrations.sizes import Layers, layers_of, planned, values_alone
from kvpact.spec import DEFAULT_SPEC
from kvpact_pages.results import code, table

LENGTHS = (32768, 131072)
FIRST = (
    "llama-3.1-8b", "llama-3.3-70b-instruct", "qwen3-8b", "qwen3.6-27b", "gpt-oss-20b",
    "gemma-3-27b-it", "deepseek-v3",
)  # fmt: skip
"""In the README; the page has all."""
COLUMNS = ("model", "layers compressed", "32k tokens, exact", "with kvpact")
COLUMNS += ("128k tokens, exact", "with kvpact")


def gigabytes(count: float) -> str:
    """Return bytes as gigabytes, three digits of them."""
    size = count / 1e9
    return f"{size:.2f} GB" if size < 10 else f"{size:.1f} GB" if size < 100 else f"{size:.0f} GB"


def row(name: str, title: str, k_eq_v: bool = False) -> list[str]:
    """Return a model's row: its layers, and the bytes of one sequence."""
    held = values_alone(layers_of(name)) if k_eq_v else layers_of(name)
    cells = [title, f"{sum(x.compressed for x in held.shapes)} of {len(held.shapes)}"]
    for tokens in LENGTHS:
        found = planned(DEFAULT_SPEC, held, tokens, 1)
        share = f"{gigabytes(found['total'])} ({found['total'] / found['exact']:.0%})"
        cells += [gigabytes(found["exact"]), share if _compressed(held) else "refused"]
    return cells


def _compressed(held: Layers) -> bool:
    return any(shape.compressed for shape in held.shapes)


def kinds(name: str) -> str:
    """Return the kinds of a model's layers, in words."""
    model = model_table()["models"][name]
    said = []
    for at, kind in enumerate(model["kinds"]):
        count, text = model["order"].count(str(at)), kind["kind"].replace("_", " ")
        if kind.get("latent"):
            text += f", latents of {kind['key_dim']} and {kind['value_dim']}"
        elif kind.get("heads"):
            widths = {kind["key_dim"], kind["value_dim"]}
            heads = "1 head" if kind["heads"] == 1 else f"{kind['heads']} heads"
            text += f", {heads} of {' and '.join(map(str, sorted(widths)))}"
        said.append(f"{count} {text}".replace("dummy", "without a cache"))
    return "; ".join(said)


def first() -> str:
    """Return the rows of the README."""
    return table(COLUMNS, [row(name, code(name)) for name in FIRST], left=1)


def every() -> str:
    """Return all models, with the kinds of their layers and where these are known from."""
    document = model_table()
    numbers = {source: f"({at})" for at, source in enumerate(document["sources"], 1)}
    sizes = []
    for name in document["models"]:
        sizes.append(row(name, code(name)))
        if any(shape.k_eq_v for shape in layers_of(name).shapes):
            sizes.append(row(name, f"{code(name)}, {code('k_eq_v=True')}", k_eq_v=True))
    layers = [
        [code(name), kinds(name), numbers[model["source"]]]
        for name, model in document["models"].items()
    ]
    parts = [table(COLUMNS, sizes), "### Their layers"]
    parts += [table(("model", "its layers", "source"), layers, left=3), "Sources of the layers:"]
    parts.append("\n".join(f"{at}. {x}" for at, x in enumerate(document["sources"].values(), 1)))
    return "\n\n".join(parts)


BLOCKS = {"models-first": first}
PAGE = {"models-all": every}
