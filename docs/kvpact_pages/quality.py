"""What ``quality.md`` takes from committed evaluations."""

from __future__ import annotations

from typing import Any

from kvpact.data import recipe_names
from kvpact.recipe import load_recipe
from kvpact_pages.chart import draw
from kvpact_pages.results import MODELS, NARROW, code, kl, kl_and_error, load, percent, ratio, table

ABLATED = "sinks=0,window=0"
FAMILIES = (
    "trellis", "turboquant", "int", "turboquant center=64,first=true", "kvarn", "kivi",
    "turboquant center=64", "fp8", "int rotate=true", "polarquant", "int group=128,rotate=true",
)  # fmt: skip
"""Methods in the order of their colours."""


COLUMNS = ("spec", "bits, slots", "bits, all-in", "KL mean", "KL p99", "top-1", "perplexity")


def summary() -> str:
    """Return what the page shows, in a sentence."""
    rows = [row for name in MODELS for row in load(f"models/{name}/eval.json")]
    worst = {
        bits: max(_kl(row) for row in rows if row["spec"] == f"trellis:bits={bits}")
        for bits in (4, 3)
    }
    return (
        f"On a novel and two small models `trellis` costs at most {kl(worst[4])} nats of KL per "
        f"token at 4 bits, and {kl(worst[3])} at 3. Methods rank differently from model to model, "
        "and texts differ, so measure on yours: `kvpact eval` prints tables like those of this "
        "page for models of transformers, and `kvpact recommend` "
        "[chooses a spec](#which-spec-for-which-model)."
    )


def _plain() -> list[dict[str, Any]]:
    """Return the specs of the ablation, the least KL first, by the protocol of all pages."""
    ablated = {row["spec"] for row in load("quality/eval.json") if row["packed_only"]}
    rows = load("models/smollm2/eval.json")
    return sorted((row for row in rows if row["spec"] in ablated), key=_kl)


def novel() -> str:
    """Return the table of SmolLM2."""
    return table(COLUMNS, [_cells(row) for row in _plain()])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        code(row["spec"]),
        f"{row['slot_bits_per_value']:.3f}",
        f"{row['bits_per_value']:.2f}",
        kl(row["kl_mean"]),
        kl(row["kl_p99"]),
        percent(row["top1"]),
        "+" * (row["perplexity_change"] >= 0) + percent(row["perplexity_change"], 2),
    ]


def exact_tokens() -> str:
    """Return what exact first and last tokens are worth: KL without them over KL with them."""
    rows, cells = load("quality/eval.json"), []
    for spec in (row["spec"] for row in _plain()):
        mean = next(r["kl_mean"] for r in rows if r["spec"] == spec and not r["packed_only"])
        bare = spec + ("," if ":" in spec else ":") + ABLATED
        without = next(r for r in rows if r["spec"] == bare)
        packed = next(r for r in rows if r["spec"] == spec and r["packed_only"])
        ratios = [ratio(other["kl_mean"] / mean) for other in (without, packed)]
        cells.append([code(spec), *ratios])
    return table(("spec", f"with `{ABLATED}`", "packed only"), cells)


def _kl(row: dict[str, Any]) -> float:
    return float(row["kl_mean"])


def _of_both(spec: str, found: dict[str, dict[str, Any]]) -> list[str]:
    cells = []
    for rows in found.values():
        row = rows[spec]
        cells += [f"{row['slot_bits_per_value']:.2f}", kl_and_error(row)]
    return cells


def _by_spec(name: str) -> dict[str, Any]:
    return {row["spec"]: row for row in load(name)}


def coverage() -> str:
    """Return a sentence about what of Gemma is compressed."""
    row = next(row for row in load("models/gemma3/eval.json") if row["spec"] != "none")
    layers = row["layers_compressed"] + row["layers_native"]
    share = 100 * row["covered_bytes"] / row["exact_bytes"]
    return (
        f"Only {row['layers_compressed']} of Gemma's {layers} layers have full attention and are "
        f"compressed; at {row['tokens']:,} tokens they hold {share:.1f} % of the cache's bytes, a "
        "share that grows with the context."
    )


def storage() -> str:
    """Return the table of `pca`, beside the best method of 2 bits on the same tokens.

    Bits include what was learnt. On SmolLM2 `trellis` learnt from the first tokens, as by default;
    on Gemma it had the same calibration as `pca`.
    """
    found = {name: _by_spec(f"pca/{name}/eval.json") for name in MODELS}
    specs = ["trellis:bits=2", *(spec for spec in found["smollm2"] if spec != "none")]
    plain = [row for row in load("quality/eval.json") if not row["packed_only"]]
    found["smollm2"] |= {row["spec"]: row for row in plain}
    rows = [[code(spec), *_of_both(spec, found)] for spec in specs]
    columns = (cell for name in MODELS.values() for cell in ("bits, slots and learnt", name))
    return table(["spec", *columns], rows)


def tool_calls() -> str:
    """Return the share of arguments of tool calls that each cache keeps, beside the exact one's."""
    cells: dict[str, list[str]] = {}
    for name in MODELS:
        (data,) = load(f"tools/{name}/tasks.json")
        rows = [row for row in data["rows"] if row["task"] is None]
        exact = _with_error(rows[0], "exact_correct")
        cells.setdefault("exact", []).extend((exact, "", f"{rows[0]['exact_logprob']:.3f}"))
        for row in rows:
            change = f"{row['correct'] - row['exact_correct']:+.1f}"
            told = f"{change}{NARROW}±{NARROW}{row['change_se']:.1f}"
            own = (_with_error(row, "correct"), told, f"{row['logprob']:.3f}")
            cells.setdefault(code(row["spec"]), []).extend(own)
    columns = (cell for name in MODELS.values() for cell in (f"{name}: kept, %", "change", "log-p"))
    return table(("cache", *columns), [[name, *told] for name, told in cells.items()])


def _with_error(row: dict[str, Any], what: str) -> str:
    return f"{row[what]:.1f}{NARROW}±{NARROW}{row[what + '_se']:.1f}"


def learnt() -> str:
    """Return the table of methods that learn from the first tokens."""
    rows = sorted((row for row in load("fitted/eval.json") if row["spec"] != "none"), key=_kl)
    return table(COLUMNS, [_cells(row) for row in rows])


def recommended() -> str:
    """Return what recipes gain over a spec for all layers, at equal bytes."""
    rows = load("recommend/recommend.json")
    columns = ["model", "text", "of exact", "spec for all layers: predicted, measured"]
    columns += ["recipe: predicted, measured", "recipe less spec"]
    cells = []
    for one, recipe in zip(rows[::2], rows[1::2], strict=True):
        if one["spec"] == "trellis:bits=2":  # the recipe is the spec itself
            continue
        cells.append(
            [
                MODELS[one["model"]],
                one["text"],
                percent(100 * one["share"]),
                f"{kl(one['predicted'])}, {kl(one['measured'])}",
                f"{kl(recipe['predicted'])}, {kl(recipe['measured'])}",
                f"{recipe['difference']:+.5f}{NARROW}±{NARROW}{kl(recipe['difference_se'])}",
            ]
        )
    return table(columns, cells, left=2)


def shipped() -> str:
    """Return what was measured of the recipes in the package, on both texts."""
    columns = ("name", "of exact", "KL, novel", "KL, topics")
    columns += ("spec for all layers", "of exact", "KL, novel", "KL, topics")
    cells = []
    for name in recipe_names():
        if name.endswith("-budget"):
            continue
        own, one, own_held_out, one_held_out = load_recipe(f"recipe:{name}")["measured"]["rows"]
        pairs = ((own, own_held_out), (one, one_held_out))
        recipe, spec = ([percent(x["percent"]), kl(x["kl"]), kl(y["kl"])] for x, y in pairs)
        cells.append([f"`recipe:{name}`", *recipe, code(one["spec"]), *spec])
    return table(columns, cells)


def novel_chart() -> str:
    """Draw KL over the bits of all bytes held on SmolLM2."""
    rows = _plain()
    return _chart(_title("smollm2", rows), rows, "bits_per_value", "all bytes held")


def model_chart(name: str) -> str:
    """Draw KL over bits of the slots on one of the two models."""
    rows = [r for r in load(f"models/{name}/eval.json") if r["spec"] not in ("none", "qjl")]
    rows = [row for row in rows if "sinks" not in row["spec"]]
    return _chart(_title(name, rows), rows, "slot_bits_per_value", "packed slots")


def _title(name: str, rows: list[dict[str, Any]]) -> str:
    return f"{MODELS[name]}, {rows[0]['scored']:,} scored tokens of a novel"


def _chart(title: str, rows: list[dict[str, Any]], bits: str, what: str) -> str:
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in FAMILIES}
    for row in sorted(rows, key=lambda row: row[bits]):
        lines.setdefault(_family(row["spec"]), []).append((row[bits], row["kl_mean"]))
    widest = max(row[bits] for row in rows)
    marks = {float(n): str(n) for n in range(2, int(widest) + 2, 1 if widest < 7 else 2)}
    names = (f"bits per value, {what}", "mean KL, nats per token")
    return draw(title, lines, marks, *names)


def _family(spec: str) -> str:
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("bits=")]
    return name + (f" {','.join(kept)}" if kept else "")


def pictures() -> dict[str, str]:
    """Return the pictures of the page by file name."""
    return {
        "quality.svg": novel_chart(),
        **{f"quality-{name}.svg": model_chart(name) for name in MODELS},
    }


BLOCKS = {
    "quality-summary": summary,
    "quality-novel": novel,
    "quality-exact": exact_tokens,
    "quality-storage": storage,
    "quality-tools": tool_calls,
    "quality-learnt": learnt,
    "quality-recommend": recommended,
    "quality-recipes": shipped,
}
