"""``kvpact size --budget``: the schedule of a cache with a budget, as bits over tokens."""

from dataclasses import replace
from math import log
from typing import Any

from kvpact.cache import create_cache
from kvpact.cache.budget.cache import BudgetCache
from kvpact.cache.budget.ladder import Schedule
from kvpact.cli.console import explain, output_console, print_table, size_text
from kvpact.data import model_table
from kvpact.errors import SpecError
from kvpact.geometry import CacheGeometry, dtype_of
from kvpact.integrations import sizes
from kvpact.recipe import SpecLike

_ROWS, _BAR = 12, 48


def schedule_of(
    model: str | CacheGeometry,
    amount: str,
    spec: SpecLike,
    *,
    context: int,
    batch: int = 1,
    dtype: str | None = None,
) -> Schedule:
    """Return the schedule of a cache of a model, or of a geometry, that begins with `spec`."""
    given = dtype_of(dtype or "bfloat16")
    if isinstance(model, CacheGeometry):
        made = create_cache(spec, model, budget=amount, context=context)
        assert isinstance(made, BudgetCache)
        return made.budget.schedule(model, batch, given)
    from transformers import AutoConfig

    from kvpact.integrations.models import load_config
    from kvpact.integrations.transformers.model.budget import model_budget
    from kvpact.integrations.transformers.model.facts import layer_facts

    known = sizes.known_name(model)
    table = model_table()["models"]
    config = AutoConfig.for_model(**table[known]["config"]) if known else load_config(model)
    facts = layer_facts(config.get_text_config(decoder=True))
    budget = model_budget(config, facts, amount, spec, None, context)
    shapes = [x for x in sizes.layers_of(config, dtype).shapes if x.compressed]
    if len({x.geometry(given) for x in shapes}) != 1:
        raise SpecError(
            "layers have K and V of different shapes: a budget needs layers of one shape"
        )
    geometry = replace(shapes[0].geometry(given), num_layers=len(shapes))
    return budget.for_geometry(geometry).schedule(geometry, batch, given)


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule with its bits and bytes at some lengths, ready for JSON."""
    first, last = min([*schedule.lengths(), schedule.max_tokens]), schedule.max_tokens
    steps = range(_ROWS - 1)
    grown = [first * (last / first) ** (i / (_ROWS - 2)) for i in steps] if last > first else [last]
    lengths = [min(max(round(x / 64), 1) * 64, last) for x in grown]
    layers = range(len(schedule.layers))
    rows = [
        {
            "tokens": n,
            "bits": schedule.bits(n),
            "bytes": sum(schedule.layer_bytes(i, n) for i in layers),
        }
        for n in dict.fromkeys(lengths)
    ]
    return {**schedule.as_dict(), "rows": rows}


def show_schedule(data: dict[str, Any]) -> None:
    """Print the document of ``--json`` as a table with a bar for the bits at each length."""
    plain = not output_console().encoding.lower().startswith("utf")
    most = max(row["bits"] for row in data["rows"])
    width = len(f"{data['max_tokens']:,}")
    lines = []
    for row in data["rows"]:
        drawn = max(round(_BAR * log(1 + row["bits"]) / log(1 + most)), 1)
        bar = ("#" if plain else "█") * drawn
        head = f"{row['tokens']:{width},}", f"{row['bits']:5.2f}", f"{size_text(row['bytes']):>9}"
        lines.append((*head, bar))
    print_table(("tokens", "bits", "bytes", "bits, log scale"), lines, left=4)
    explain(
        f"Budget: {size_text(data['budget'])}; bits: mean of packed numbers of K and V; bytes: of "
        f"compressed layers, at most. {data['max_tokens']:,} tokens fit."
    )
